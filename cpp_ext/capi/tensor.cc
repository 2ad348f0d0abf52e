#include "capi/tensor.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "capi/error.h"

namespace gradfuse::capi {
namespace {

std::optional<DType> DTypeOf(int type) {
  switch (type) {
    case ACL_FLOAT: return DType::kFloat32;
    case ACL_FLOAT16: return DType::kFloat16;
    case ACL_BF16: return DType::kBFloat16;
    case ACL_DOUBLE: return DType::kFloat64;
    case ACL_INT8: return DType::kInt8;
    case ACL_UINT8: return DType::kUInt8;
    case ACL_INT16: return DType::kInt16;
    case ACL_INT32: return DType::kInt32;
    case ACL_INT64: return DType::kInt64;
    case ACL_BOOL: return DType::kBool;
    default: return std::nullopt;
  }
}

[[noreturn]] void Refuse(const std::string& argument, const std::string& got, const std::string& wanted) {
  throw Error(ACL_ERROR_INVALID_PARAM, argument + " is " + got + "; expected " + wanted);
}

std::string At(const char* name, uint64_t index) { return std::string(name) + "[" + std::to_string(index) + "]"; }

void ExpectNonNegative(const char* name, const int64_t* values, uint64_t count) {
  if (count > 0) ExpectPointer(values, name, "an array", ACL_ERROR_INVALID_PARAM);
  for (uint64_t index = 0; index < count; ++index) {
    if (values[index] < 0) Refuse(At(name, index), std::to_string(values[index]), "0 or more");
  }
}

// The number of elements of a shape. Their bytes, also without the dimensions of size 0, are few enough for all
// arithmetic with them.
int64_t CountOf(const char* name, const int64_t* dims, uint64_t rank, DType dtype) {
  constexpr int64_t kMaxBytes = int64_t{1} << 62;
  int64_t bytes = SizeOf(dtype);
  bool empty = false;
  for (uint64_t axis = 0; axis < rank; ++axis) {
    empty = empty || dims[axis] == 0;
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(dims[axis], 1), &bytes) || bytes > kMaxBytes) {
      Refuse(name, "of more than 2^62 bytes", "a shape that fits in memory");
    }
  }
  return empty ? 0 : bytes / SizeOf(dtype);
}

GivenTensor MakeTensor(const int64_t* view_dims, uint64_t rank, int type, const int64_t* strides, int64_t offset,
                       aclFormat format, const int64_t* storage_dims, uint64_t storage_rank, void* data) {
  const std::optional<DType> dtype = DTypeOf(type);
  if (!dtype) Refuse("dataType", std::to_string(type), "one of the types of aclDataType but ACL_DT_UNDEFINED");
  constexpr uint64_t kAnyRank = 64;
  if (rank > kAnyRank) Refuse("viewDimsNum", std::to_string(rank), "8 or less");
  ExpectNonNegative("viewDims", view_dims, rank);
  ExpectNonNegative("stride", strides, rank);
  ExpectNonNegative("storageDims", storage_dims, storage_rank);
  if (offset < 0) Refuse("offset", std::to_string(offset), "0 or more");
  const int64_t count = CountOf("viewDims", view_dims, rank, *dtype);
  const int64_t room = CountOf("storageDims", storage_dims, storage_rank, *dtype);
  int64_t last = offset;
  for (uint64_t axis = 0; axis < rank && count > 0; ++axis) {
    int64_t reach;
    if (__builtin_mul_overflow(view_dims[axis] - 1, strides[axis], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      Refuse(At("stride", axis), std::to_string(strides[axis]), "a view that stays in its storage");
    }
  }
  if (count > 0 && last >= room) {
    Refuse("the view's last element", "element " + std::to_string(last) + " of the storage",
           "less than the " + std::to_string(room) + " that storageDims has");
  }

  GivenTensor tensor{MutableTensor(data, *dtype, Shape(view_dims, rank)), format};
  std::copy_n(strides, std::min<uint64_t>(rank, kMaxRank), tensor.view.strides);
  // An empty view may have an offset that leads nowhere.
  if (data != nullptr && count > 0) tensor.view.data = static_cast<char*>(data) + offset * SizeOf(*dtype);
  return tensor;
}

// A null handle is none to destroy.
template <class Table>
void Destroy(const void* handle, const char* name, const char* maker) {
  if (handle == nullptr || Table::Shared().Take(handle)) return;
  Refuse(name, "unknown or already destroyed", std::string("one of ") + maker);
}

}  // namespace
}  // namespace gradfuse::capi

using namespace gradfuse::capi;

aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t* stride,
                           int64_t offset, aclFormat format, const int64_t* storageDims, uint64_t storageDimsNum,
                           void* tensorData) {
  aclTensor* made = nullptr;
  Guarded("aclCreateTensor", [&] {
    made = static_cast<aclTensor*>(TensorTable::Shared().Add(
        MakeTensor(viewDims, viewDimsNum, dataType, stride, offset, format, storageDims, storageDimsNum, tensorData)));
  });
  return made;
}

aclnnStatus aclDestroyTensor(const aclTensor* tensor) {
  return GuardedOp("aclDestroyTensor", [&] { Destroy<TensorTable>(tensor, "tensor", "aclCreateTensor"); });
}

aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size) {
  aclIntArray* made = nullptr;
  Guarded("aclCreateIntArray", [&] {
    if (size > 0) ExpectPointer(value, "value", "an array", ACL_ERROR_INVALID_PARAM);
    made = static_cast<aclIntArray*>(
        IntArrayTable::Shared().Add(std::make_shared<const std::vector<int64_t>>(value, value + size)));
  });
  return made;
}

aclnnStatus aclDestroyIntArray(const aclIntArray* array) {
  return GuardedOp("aclDestroyIntArray", [&] { Destroy<IntArrayTable>(array, "array", "aclCreateIntArray"); });
}
