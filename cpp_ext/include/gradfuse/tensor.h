#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace gradfuse {

// The last three are ones that no op takes: a host may still have them, and errors name them.
enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kInt32, kInt64, kBool, kInt8, kUInt8, kInt16 };

constexpr const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat64: return "float64";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kBool: return "bool";
    case DType::kInt8: return "int8";
    case DType::kUInt8: return "uint8";
    case DType::kInt16: return "int16";
  }
  return "unknown";
}

constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kInt8:
    case DType::kUInt8: return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16: return 2;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat64:
    case DType::kInt64: return 8;
  }
  return 0;
}

constexpr int kMaxRank = 8;

// Sizes of a tensor's dimensions. A rank above kMaxRank is kept, so that a check can refuse and name it; the sizes past
// kMaxRank are not.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) : Shape(dims.begin(), dims.size()) {}
  Shape(const int64_t* dims, size_t rank) : rank_(static_cast<int>(rank)) {
    for (int axis = 0; axis < rank_ && axis < kMaxRank; ++axis) dims_[axis] = dims[axis];
  }

  int rank() const { return rank_; }
  const int64_t* dims() const { return dims_; }
  int64_t operator[](int axis) const { return dims_[axis]; }
  int64_t& operator[](int axis) { return dims_[axis]; }

  // Product of the sizes, of a rank that fits. It must fit 64 bits: true of every tensor that exists.
  int64_t NumElements() const {
    int64_t count = 1;
    for (int axis = 0; axis < rank_; ++axis) count *= dims_[axis];
    return count;
  }

  bool operator==(const Shape& other) const {
    if (rank_ != other.rank_) return false;
    for (int axis = 0; axis < rank_ && axis < kMaxRank; ++axis) {
      if (dims_[axis] != other.dims_[axis]) return false;
    }
    return true;
  }
  bool operator!=(const Shape& other) const { return !(*this == other); }

 private:
  int rank_ = 0;
  int64_t dims_[kMaxRank] = {};
};

// How the elements of a tensor lie in memory, wherever that is. Strides are in elements.
struct TensorLayout {
  DType dtype = DType::kFloat32;
  Shape shape;
  int64_t strides[kMaxRank] = {};

  TensorLayout() = default;
  // A dense (row-major, contiguous) tensor.
  TensorLayout(DType dtype_, const Shape& shape_) : dtype(dtype_), shape(shape_) {
    int64_t stride = 1;
    for (int axis = (shape.rank() < kMaxRank ? shape.rank() : kMaxRank) - 1; axis >= 0; --axis) {
      strides[axis] = stride;
      stride *= shape[axis];
    }
  }

  int64_t NumElements() const { return shape.NumElements(); }
  int64_t NumBytes() const { return NumElements() * SizeOf(dtype); }

  // Whether elements lie in row-major order without gaps. The stride of a dimension of size 1 does not matter.
  bool IsDense() const {
    int64_t stride = 1;
    for (int axis = shape.rank() - 1; axis >= 0; --axis) {
      if (shape[axis] == 0) return true;
      if (shape[axis] != 1 && strides[axis] != stride) return false;
      stride *= shape[axis];
    }
    return true;
  }
};

// A view of memory that someone else owns, to read from: an input.
struct Tensor : TensorLayout {
  const void* data = nullptr;
  bool on_host = true;  // the CPU can read the values, so a check may look at them

  Tensor() = default;
  Tensor(const void* data_, const TensorLayout& layout) : TensorLayout(layout), data(data_) {}
  // A dense tensor.
  Tensor(const void* data_, DType dtype_, const Shape& shape_) : TensorLayout(dtype_, shape_), data(data_) {}

  template <class T>
  const T* Data() const {
    return static_cast<const T*>(data);
  }
};

// The same to write to: an output.
struct MutableTensor : TensorLayout {
  void* data = nullptr;

  MutableTensor() = default;
  MutableTensor(void* data_, const TensorLayout& layout) : TensorLayout(layout), data(data_) {}
  // A dense tensor.
  MutableTensor(void* data_, DType dtype_, const Shape& shape_) : TensorLayout(dtype_, shape_), data(data_) {}

  template <class T>
  T* MutableData() const {
    return static_cast<T*>(data);
  }
};

}  // namespace gradfuse
