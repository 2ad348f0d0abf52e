#pragma once

#include <algorithm>
#include <cstdint>

#include "gradfuse/macros.h"
#include "gradfuse/tensor.h"

// Tensors whose last two axes are matrices, and whose axes before these are broadcast.
namespace gradfuse {

// The size of the axis that is so many before the last, 1 where there is none.
inline int64_t SizeFromEnd(const Shape& shape, int place) {
  return place < shape.rank() ? shape[shape.rank() - 1 - place] : 1;
}

inline bool AreBroadcast(const Shape& a, const Shape& b) {
  for (int place = 2; place < std::max(a.rank(), b.rank()); ++place) {
    const int64_t one = SizeFromEnd(a, place);
    const int64_t other = SizeFromEnd(b, place);
    if (one != other && one != 1 && other != 1) return false;
  }
  return true;
}

inline Shape BroadcastShape(const Shape& a, const Shape& b, int64_t rows, int64_t columns) {
  const Shape& longer = a.rank() < b.rank() ? b : a;
  Shape shape = longer;
  const int rank = longer.rank();
  for (int place = 2; place < rank; ++place) {
    const int64_t one = SizeFromEnd(a, place);
    shape[rank - 1 - place] = one == 1 ? SizeFromEnd(b, place) : one;
  }
  shape[rank - 2] = rows;
  shape[rank - 1] = columns;
  return shape;
}

// How many matrices a tensor has.
inline int64_t MatrixCount(const Shape& shape) {
  int64_t count = 1;
  for (int place = 2; place < shape.rank(); ++place) count *= SizeFromEnd(shape, place);
  return count;
}

// Which matrix of a factor belongs to a matrix of the product.
class MatrixOfFactor {
 public:
  MatrixOfFactor(const Shape& product, const Shape& factor) : axes_(product.rank() - 2) {
    int64_t pitch = 1;
    for (int axis = 0; axis < axes_; ++axis) {
      const int64_t size = SizeFromEnd(factor, axis + 2);
      sizes_[axis] = SizeFromEnd(product, axis + 2);
      pitches_[axis] = size == 1 ? 0 : pitch;
      pitch *= size;
    }
  }

  GRADFUSE_HOST_DEVICE int64_t operator()(int64_t index) const {
    int64_t found = 0;
    for (int axis = 0; axis < axes_; ++axis) {
      found += index % sizes_[axis] * pitches_[axis];
      index /= sizes_[axis];
    }
    return found;
  }

 private:
  int axes_;
  int64_t sizes_[kMaxRank] = {};  // of the axes of the product before its matrices, from the last one on
  int64_t pitches_[kMaxRank] = {};
};

}  // namespace gradfuse
