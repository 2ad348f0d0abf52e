#include "capi/staging.h"

#include <algorithm>
#include <string>

#include "capi/error.h"
#include "gradfuse/strided_copy.h"
#include "kernels/dispatch.h"
#include "runtime/thread_pool.h"

namespace gradfuse::capi {
namespace {

// Where the parts of a workspace begin.
constexpr int64_t kAlignment = 256;

[[noreturn]] void ThrowRefusal(const std::string& argument, const std::string& got, const std::string& wanted) {
  throw Error(ACLNN_ERR_PARAM_INVALID, Refuse(argument, got, wanted).message());
}

void ExpectUsable(const char* name, const aclTensor& tensor) {
  if (tensor.format != ACL_FORMAT_ND) {
    ThrowRefusal(name, "of format " + std::to_string(tensor.format), "ACL_FORMAT_ND");
  }
  const Tensor& view = tensor.view;
  if (view.shape.rank() > kMaxRank || view.NumElements() == 0) return;
  if (view.data == nullptr) ThrowRefusal(name, "without memory", "the address of its elements");
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(SizeOf(view.dtype)) != 0) {
    ThrowRefusal(name, "at an address that is not aligned", "a multiple of " + std::to_string(SizeOf(view.dtype)));
  }
}

// The memory of a view, from its first element to its last.
struct Range {
  explicit Range(const Tensor& view) : begin(static_cast<const char*>(view.data)), end(begin) {
    if (view.NumElements() == 0) return;
    int64_t last = 0;
    for (int axis = 0; axis < view.shape.rank(); ++axis) last += (view.shape[axis] - 1) * view.strides[axis];
    end += (last + 1) * SizeOf(view.dtype);
  }

  const char* begin;
  const char* end;
};

bool Overlap(const Range& a, const Range& b) { return a.begin < b.end && b.begin < a.end; }

}  // namespace

void Staging::Input(const char* name, const Operand& operand, const TypeSet& types, bool device_is_host,
                    Tensor& tensor) {
  if (operand.array != nullptr) {
    std::vector<int64_t>& values = arrays_.emplace_back(operand.array->values);
    tensor = Tensor(values.data(), DType::kInt64, Shape{static_cast<int64_t>(values.size())});
    return;
  }
  const Tensor& view = operand.tensor->view;
  ExpectUsable(name, *operand.tensor);
  tensor = Tensor(view.data, view.dtype, view.shape);
  tensor.on_host = device_is_host;
  const bool checked = device_is_host && types.is_checked();
  reads_values_ = reads_values_ || checked;
  if (view.shape.rank() > kMaxRank) return;
  views_.push_back(view);
  if (view.IsDense()) return;
  inputs_.push_back({&tensor, view});
  if (!checked) return;
  copies_.push_back(std::make_unique<char[]>(static_cast<size_t>(tensor.NumBytes())));
  tensor.data = copies_.back().get();
  cpu::StridedCopy(view, tensor, ThreadPool::Shared());
}

void Staging::Output(const char* name, const aclTensor& given, const Tensor& expected, Tensor& tensor) {
  const Tensor& view = given.view;
  if (view.dtype != expected.dtype || view.shape != expected.shape) {
    ThrowRefusal(name, Describe(view), Describe(expected));
  }
  ExpectUsable(name, given);
  tensor = Tensor(view.data, view.dtype, view.shape);
  const Range range(view);
  const bool is_read =
      std::any_of(views_.begin(), views_.end(), [&](const Tensor& input) { return Overlap(range, Range(input)); });
  if (is_read || !view.IsDense()) outputs_.push_back({&tensor, view});
}

uint64_t Staging::LayOut(int64_t op_bytes) {
  copies_.clear();
  // Far from overflow: a tensor has at most 2^62 bytes.
  int64_t bytes = 0;
  const auto take = [&](int64_t part) {
    const int64_t offset = bytes;
    if (part > (int64_t{1} << 62) - bytes)
      throw Error(ACLNN_ERR_PARAM_INVALID, "the workspace would have more than 2^62 bytes");
    bytes += CeilDiv(part, kAlignment) * kAlignment;
    return offset;
  };
  for (std::vector<Staged>* staged : {&inputs_, &outputs_}) {
    for (Staged& tensor : *staged) tensor.offset = take(tensor.tensor->NumBytes());
  }
  op_offset_ = take(op_bytes);
  return bytes == 0 ? 0 : static_cast<uint64_t>(bytes + kAlignment);
}

char* Staging::Place(char* workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  char* const begin = workspace + (kAlignment - address % kAlignment) % kAlignment;
  for (const std::vector<Staged>* staged : {&inputs_, &outputs_}) {
    for (const Staged& tensor : *staged) tensor.tensor->data = begin + tensor.offset;
  }
  return begin + op_offset_;
}

}  // namespace gradfuse::capi
