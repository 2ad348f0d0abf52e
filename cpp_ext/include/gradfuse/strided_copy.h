#pragma once

#include "gradfuse/parallel.h"
#include "gradfuse/queue.h"
#include "gradfuse/status.h"
#include "gradfuse/tensor.h"

namespace gradfuse {

// Copies the elements of a tensor to another of its type and shape, of rank 8 or less. Strides of both may be any that
// are not negative; the memory of one does not overlap that of the other. Elements of `to` that lie at one place get
// the value of one of them.
namespace cpu {
void StridedCopy(const Tensor& from, const Tensor& to, const ParallelFor& parallel);
}
namespace cuda {
Status StridedCopy(const Tensor& from, const Tensor& to, const Queue& queue);
}

// The dimensions that two tensors of one shape are crossed by: those of size 1 dropped, those that both cross with one
// stride merged.
struct CopyLoops {
  CopyLoops(const Tensor& from, const Tensor& to) {
    for (int axis = 0; axis < from.shape.rank(); ++axis) {
      const int64_t size = from.shape[axis];
      if (size == 1) continue;
      const bool merges = rank > 0 && from_strides[rank - 1] == from.strides[axis] * size &&
                          to_strides[rank - 1] == to.strides[axis] * size;
      const int at = merges ? rank - 1 : rank++;
      sizes[at] = merges ? sizes[at] * size : size;
      from_strides[at] = from.strides[axis];
      to_strides[at] = to.strides[axis];
    }
  }

  int rank = 0;
  int64_t sizes[kMaxRank] = {1};
  int64_t from_strides[kMaxRank] = {};
  int64_t to_strides[kMaxRank] = {};
};

}  // namespace gradfuse
