#include "gradfuse/signature.h"

#include <cstdio>

namespace gradfuse {

std::string Describe(DType dtype, const Shape& shape) {
  std::string text = std::string(Name(dtype)) + "(";
  for (int axis = 0; axis < shape.rank() && axis < kMaxRank; ++axis) {
    text += (axis ? "," : "") + std::to_string(shape[axis]);
  }
  return text + (shape.rank() > kMaxRank ? ",...)" : ")");
}

std::string Describe(const TensorLayout& tensor) { return Describe(tensor.dtype, tensor.shape); }

std::string Describe(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.15g", number);
  return text;
}

std::string Describe(const std::vector<int64_t>& numbers) {
  constexpr size_t kMostNumbers = 8;
  std::string text = "[";
  for (size_t i = 0; i < numbers.size() && i < kMostNumbers; ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  return text + (numbers.size() > kMostNumbers ? ", ...]" : "]");
}

std::string Quote(const std::string& text) {
  constexpr size_t kMostCharacters = 64;
  std::string quoted = "'";
  for (const char character : text.substr(0, kMostCharacters)) {
    if (character >= ' ' && character <= '~') {
      quoted += character;
    } else {
      char code[8];
      std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(character)));
      quoted += code;
    }
  }
  return quoted + (text.size() > kMostCharacters ? "...'" : "'");
}

Status Refuse(const std::string& argument, const std::string& got, const std::string& wanted) {
  return {StatusCode::kInvalidArgument, argument + " is " + got + "; expected " + wanted};
}

namespace internal {
namespace {

std::string List(const TypeSet& types) {
  std::string text;
  for (int index = 0; index < types.size(); ++index) {
    text += (index == 0 ? "" : index + 1 == types.size() ? " or " : ", ") + std::string(Name(types[index]));
  }
  return text;
}

}  // namespace

Status LayoutCheck::CheckType(const char* name, const Tensor& tensor, const TypeSet& types) {
  GRADFUSE_EXPECT(types.Contains(tensor.dtype), name, Name(tensor.dtype), List(types));
  return {};
}

Status LayoutCheck::CheckT(const char* name, const Tensor& tensor) const {
  const FirstInputs::First& first = first_.t();
  if (name == first.name) return CheckType(name, tensor, t_);
  GRADFUSE_EXPECT(tensor.dtype == first.type, name, Name(tensor.dtype),
                  std::string(Name(first.type)) + " as " + first.name);
  return {};
}

Status LayoutCheck::CheckA(const char* name, const Tensor& tensor) const {
  const auto& [t_name, t] = first_.t();
  if (name == t_name) return CheckType(name, tensor, t_);
  const auto& [a_name, a] = first_.of_a;
  if (name != a_name) {
    GRADFUSE_EXPECT(tensor.dtype == a, name, Name(tensor.dtype), std::string(Name(a)) + " as " + a_name);
    return {};
  }
  GRADFUSE_EXPECT(TypeSet::IsActivationOf(a, t), name, Name(a),
                  std::string(Name(t)) + " as " + t_name + (t == DType::kFloat64 ? "" : ", or bfloat16"));
  return {};
}

Status LayoutCheck::CheckChoice(const char* name, const Tensor& tensor, const TypeSet& types) const {
  const auto& [first_name, t] = first_.t();
  std::string list;
  for (int index = 0; index < types.choices(); ++index) {
    const DType choice = types.Choice(index, t, first_.of_a.type);
    if (tensor.dtype == choice) return {};
    list += (index == 0 ? "" : " or ") + std::string(Name(choice));
  }
  return Refuse(name, Name(tensor.dtype), list + ", as " + first_name + " is " + Name(t));
}

}  // namespace internal
}  // namespace gradfuse
