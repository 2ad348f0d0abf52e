#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "gradfuse/status.h"
#include "gradfuse/tensor.h"

namespace gradfuse {

// The type that values of a type are computed in.
constexpr DType ComputedType(DType type) { return type == DType::kFloat64 ? type : DType::kFloat32; }

// Of float32 and bfloat16 the one that a type is not.
constexpr DType OtherType(DType type) { return type == DType::kBFloat16 ? DType::kFloat32 : DType::kBFloat16; }

// The element types that an argument takes. Empty stands for T, the type that an op's main arguments share.
class TypeSet {
 public:
  constexpr TypeSet() = default;
  // NOLINTNEXTLINE(*-explicit-constructor): a type stands for the set of it
  constexpr TypeSet(DType type) : TypeSet({type}) {}
  constexpr TypeSet(std::initializer_list<DType> types) {
    for (DType type : types) types_[size_++] = type;
  }

  // The same types for an input that is in host memory whatever the device is: its values decide an output's shape.
  constexpr TypeSet ReadByHost() const {
    TypeSet set = *this;
    set.read_by_host_ = true;
    return set;
  }

  // The same types for an input whose values are checked if the host can read them.
  constexpr TypeSet Checked() const {
    TypeSet set = *this;
    set.checked_ = true;
    return set;
  }

  // The same types, and T.
  constexpr TypeSet OrT() const {
    TypeSet set = *this;
    set.or_t_ = true;
    return set;
  }

  // The type that T is computed in.
  static constexpr TypeSet ComputedT() {
    TypeSet set;
    set.is_computed_ = true;
    return set;
  }

  // The other type of an op whose T is float32 or bfloat16.
  static constexpr TypeSet OtherThanT() {
    TypeSet set;
    set.is_other_ = true;
    return set;
  }

  // A: the type that an op's activations share, T or, where that is not float64, bfloat16. Without any input of T, that
  // is A.
  static constexpr TypeSet Activation() {
    TypeSet set;
    set.is_a_ = true;
    return set;
  }
  static constexpr bool IsActivationOf(DType a, DType t) {
    return a == t || (a == DType::kBFloat16 && t != DType::kFloat64);
  }

  // The types that there are to choose from once T is known: all those that do not follow from it.
  constexpr int choices() const { return size_ + (size_ == 0 || or_t_ ? 1 : 0); }
  constexpr DType Choice(int index, DType t, DType a) const {
    return index < size_ ? types_[index] : is_computed_ ? ComputedType(t) : is_other_ ? OtherType(t) : is_a_ ? a : t;
  }

  constexpr bool read_by_host() const { return read_by_host_; }
  constexpr bool is_checked() const { return checked_; }
  constexpr bool is_t() const { return size_ == 0 && !is_computed_ && !is_other_ && !is_a_; }
  constexpr bool is_a() const { return is_a_; }
  constexpr bool follows_t() const { return is_computed_ || is_other_ || or_t_ || is_a_; }
  constexpr int size() const { return size_; }
  constexpr DType operator[](int index) const { return types_[index]; }
  constexpr const DType* begin() const { return types_; }
  constexpr const DType* end() const { return types_ + size_; }
  constexpr bool Contains(DType type) const {
    for (DType member : *this) {
      if (member == type) return true;
    }
    return false;
  }

 private:
  DType types_[8] = {};
  int size_ = 0;
  bool is_computed_ = false;
  bool is_other_ = false;
  bool is_a_ = false;
  bool or_t_ = false;
  bool read_by_host_ = false;
  bool checked_ = false;
};

inline constexpr TypeSet kT{};
inline constexpr TypeSet kComputedT = TypeSet::ComputedT();
inline constexpr TypeSet kOtherThanT = TypeSet::OtherThanT();
inline constexpr TypeSet kA = TypeSet::Activation();

// Every op is a struct of its arguments: inputs (std::optional where they may be absent), attributes with their
// defaults, and outputs. Its static Visit(args, visitor) shows each to a visitor, in the order of the ONNX signature:
//
//   visitor.Input(name, tensor_or_optional, types)
//   visitor.Attribute(name, int64_t_or_float_or_string_or_vector_of_int64_t)
//   visitor.Output(name, tensor, types)
//
// so that what adapts ops to a host (ONNX Runtime, a C API) is written once for all of them.

// "float32(2,3)".
std::string Describe(const TensorLayout& tensor);
std::string Describe(DType dtype, const Shape& shape);

// "[1, 2]".
std::string Describe(const std::vector<int64_t>& numbers);

// As short as it can be: "0.5".
std::string Describe(double number);

// In quotes, in one line and in ASCII whatever the text holds: "'mean\\x00'". Long texts end in "...".
std::string Quote(const std::string& text);

// InvalidArgument: `<argument> is <got>; expected <wanted>`.
Status Refuse(const std::string& argument, const std::string& got, const std::string& wanted);

#define GRADFUSE_RETURN_IF_ERROR(expression)  \
  do {                                        \
    ::gradfuse::Status status = (expression); \
    if (!status.ok()) return status;          \
  } while (false)

#define GRADFUSE_EXPECT(condition, argument, got, wanted)                     \
  do {                                                                        \
    if (!(condition)) return ::gradfuse::Refuse((argument), (got), (wanted)); \
  } while (false)

namespace internal {

// The first inputs of types T and A.
struct FirstInputs {
  struct First {
    const char* name = nullptr;
    DType type = DType::kFloat32;
  };

  void Input(const char* name, const Tensor& tensor, const TypeSet& types) {
    First& first = types.is_a() ? of_a : of_t;
    if (first.name == nullptr && (types.is_a() || types.is_t())) first = {name, tensor.dtype};
  }
  void Input(const char* name, const std::optional<Tensor>& tensor, const TypeSet& types) {
    if (tensor) Input(name, *tensor, types);
  }
  template <class Value>
  void Attribute(const char*, const Value&) {}
  void Output(const char*, const MutableTensor&, const TypeSet&) {}

  const First& t() const { return of_t.name != nullptr ? of_t : of_a; }

  First of_t;
  First of_a;
};

class LayoutCheck {
 public:
  LayoutCheck(const TypeSet& t, const FirstInputs& first) : t_(t), first_(first) {}

  void Input(const char* name, const Tensor& tensor, const TypeSet& types) {
    if (!status.ok()) return;
    status = types.is_t()        ? CheckT(name, tensor)
             : types.is_a()      ? CheckA(name, tensor)
             : types.follows_t() ? CheckChoice(name, tensor, types)
                                 : CheckType(name, tensor, types);
    if (status.ok() && tensor.shape.rank() > kMaxRank) {
      status = Refuse(name, "of rank " + std::to_string(tensor.shape.rank()), "rank 8 or less");
    }
    if (status.ok() && !tensor.IsDense()) status = Refuse(name, "strided", "a contiguous tensor");
  }
  void Input(const char* name, const std::optional<Tensor>& tensor, const TypeSet& types) {
    if (tensor) Input(name, *tensor, types);
  }
  template <class Value>
  void Attribute(const char*, const Value&) {}
  void Output(const char*, const MutableTensor&, const TypeSet&) {}

  Status status;

 private:
  static Status CheckType(const char* name, const Tensor& tensor, const TypeSet& types);
  Status CheckT(const char* name, const Tensor& tensor) const;
  Status CheckA(const char* name, const Tensor& tensor) const;
  Status CheckChoice(const char* name, const Tensor& tensor, const TypeSet& types) const;

  TypeSet t_;
  const FirstInputs& first_;
};

class InputFinder {
 public:
  explicit InputFinder(int32_t place) : rest_(place) {}

  template <class Value>
  void Input(const char* name, const Value&, const TypeSet&) {
    if (--rest_ == 0) name_ = name;
  }
  template <class Value>
  void Attribute(const char*, const Value&) {}
  void Output(const char*, const MutableTensor&, const TypeSet&) {}

  const char* name() const { return name_; }

 private:
  int32_t rest_;
  const char* name_ = "an input";
};

}  // namespace internal

// The name of the input at `place` of an op's signature, counted from 1, as a device reports faults.
template <class Args>
const char* InputName(int32_t place) {
  internal::InputFinder finder(place);
  const Args none;
  Args::Visit(none, finder);
  return finder.name();
}

// What every op asks of every input: an element type that it takes, one type for all that share T, a rank that fits
// and contiguous elements.
template <class Args>
Status CheckLayout(const Args& args) {
  internal::FirstInputs first;
  Args::Visit(args, first);
  internal::LayoutCheck check(Args::kTypes, first);
  Args::Visit(args, check);
  return check.status;
}

}  // namespace gradfuse
