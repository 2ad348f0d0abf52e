#include "capi/staging.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "capi/error.h"
#include "capi/shared_mutex.h"
#include "capi/thread_pool.h"
#include "gradfuse/strided_copy.h"
#include "kernels/dispatch.h"

namespace gradfuse::capi {
namespace {

// Where the parts of a workspace begin.
constexpr int64_t kAlignment = 256;

[[noreturn]] void ThrowRefusal(const std::string& argument, const std::string& got, const std::string& wanted) {
  throw Error(ACLNN_ERR_PARAM_INVALID, Refuse(argument, got, wanted).message());
}

void ExpectUsable(const char* name, const GivenTensor& tensor) {
  if (tensor.format != ACL_FORMAT_ND) {
    ThrowRefusal(name, "of format " + std::to_string(tensor.format), "ACL_FORMAT_ND");
  }
  const MutableTensor& view = tensor.view;
  if (view.shape.rank() > kMaxRank || view.NumElements() == 0) return;
  if (view.data == nullptr) ThrowRefusal(name, "without memory", "the address of its elements");
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(SizeOf(view.dtype)) != 0) {
    ThrowRefusal(name, "at an address that is not aligned", "a multiple of " + std::to_string(SizeOf(view.dtype)));
  }
}

// The memory of a view, from its first element to its last.
struct Range {
  explicit Range(const MutableTensor& view) : begin(static_cast<const char*>(view.data)), end(begin) {
    if (view.NumElements() == 0) return;
    int64_t last = 0;
    for (int axis = 0; axis < view.shape.rank(); ++axis) last += (view.shape[axis] - 1) * view.strides[axis];
    end += (last + 1) * SizeOf(view.dtype);
  }

  bool is_empty() const { return begin == end; }

  const char* begin;
  const char* end;
};

bool Overlap(const Range& a, const Range& b) {
  return !a.is_empty() && !b.is_empty() && a.begin < b.end && b.begin < a.end;
}

}  // namespace

void ReadOperand(const char* name, const Operand& operand, Argument& argument) {
  argument.name = name;
  if (operand.handle == nullptr) return;
  if (operand.is_array) {
    const IntArray* const array = IntArrayTable::Shared().Find(operand.handle);
    if (array == nullptr) ThrowRefusal(name, "unknown or already destroyed", "one of aclCreateIntArray");
    argument.array = *array;
  } else {
    const GivenTensor* const tensor = TensorTable::Shared().Find(operand.handle);
    if (tensor == nullptr) ThrowRefusal(name, "unknown or already destroyed", "one of aclCreateTensor");
    argument.tensor = *tensor;
  }
}

std::vector<int64_t> ReadNumbers(const char* name, const aclIntArray* array) {
  ExpectPointer(array, name, "one to an argument", ACLNN_ERR_PARAM_NULLPTR);
  Argument argument;
  const std::lock_guard lock(SharedMutex());
  ReadOperand(name, Operand(array), argument);
  return *argument.array;
}

void Staging::Input(const Argument& argument, const TypeSet& types, Tensor& tensor) {
  if (argument.array != nullptr) {
    const std::vector<int64_t>& values = *arrays_.emplace_back(argument.array);
    tensor = Tensor(values.data(), DType::kInt64, Shape{static_cast<int64_t>(values.size())});
    return;
  }
  const GivenTensor& given = argument.tensor.value();
  ExpectUsable(argument.name, given);
  const Tensor view(given.view.data, given.view);
  tensor = Tensor(view.data, view.dtype, view.shape);
  tensor.on_host = false;
  if (view.shape.rank() > kMaxRank) return;
  if (types.is_checked()) checked_.push_back({&tensor, view});
  if (!view.IsDense()) inputs_.push_back({&tensor, view, MutableTensor(nullptr, view.dtype, view.shape)});
}

void Staging::Output(const Argument* inputs, const Argument* outputs, const Argument* argument,
                     const TensorLayout& expected, MutableTensor& tensor) {
  const GivenTensor& given = argument->tensor.value();
  const MutableTensor& view = given.view;
  if (view.dtype != expected.dtype || view.shape != expected.shape) {
    ThrowRefusal(argument->name, Describe(view), Describe(expected));
  }
  ExpectUsable(argument->name, given);
  tensor = MutableTensor(view.data, view.dtype, view.shape);
  const Range range(view);
  bool is_staged = !view.IsDense();
  for (const Argument* other = inputs; other != argument; ++other) {
    if (!other->tensor) continue;
    const MutableTensor& other_view = other->tensor.value().view;
    if (!Overlap(range, Range(other_view))) continue;
    // Views with strides may lie between each other's elements.
    if (other >= outputs && view.IsDense() && other_view.IsDense()) {
      ThrowRefusal(argument->name, std::string("in the memory of ") + other->name, "memory of its own");
    }
    is_staged = true;
  }
  if (is_staged) outputs_.push_back({&tensor, view});
}

std::vector<std::unique_ptr<char[]>> Staging::ReadValues() {
  std::vector<std::unique_ptr<char[]>> copies;
  for (const Checked& checked : checked_) {
    Tensor& tensor = *checked.tensor;
    tensor.on_host = true;
    if (checked.view.IsDense()) continue;
    std::unique_ptr<char[]> memory(new char[static_cast<size_t>(tensor.NumBytes())]);
    const MutableTensor copy(memory.get(), tensor);
    copies.push_back(std::move(memory));
    tensor.data = copy.data;
    cpu::StridedCopy(checked.view, copy, ThreadPool::Shared());
  }
  return copies;
}

uint64_t Staging::LayOut(int64_t op_bytes) {
  // Far from overflow: a tensor has at most 2^62 bytes.
  int64_t bytes = 0;
  const auto take = [&](int64_t part) {
    const int64_t offset = bytes;
    if (part > (int64_t{1} << 62) - bytes)
      throw Error(ACLNN_ERR_PARAM_INVALID, "the workspace would have more than 2^62 bytes");
    bytes += CeilDiv(part, kAlignment) * kAlignment;
    return offset;
  };
  for (StagedInput& input : inputs_) input.offset = take(input.copy.NumBytes());
  for (StagedOutput& output : outputs_) output.offset = take(output.tensor->NumBytes());
  op_offset_ = take(op_bytes);
  return bytes == 0 ? 0 : static_cast<uint64_t>(bytes + kAlignment);
}

char* Staging::Place(char* workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  char* const begin = workspace + (kAlignment - address % kAlignment) % kAlignment;
  for (StagedInput& input : inputs_) input.tensor->data = input.copy.data = begin + input.offset;
  for (const StagedOutput& output : outputs_) output.tensor->data = begin + output.offset;
  return begin + op_offset_;
}

}  // namespace gradfuse::capi
