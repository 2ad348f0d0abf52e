#pragma once

#include "gradfuse/tensor.h"

namespace gradfuse {

// Nested loops over the elements of a shape, with the strides of several tensors that are crossed side by side. The
// tensors broadcast to the shape; where one repeats its elements, its stride is 0. The loops are as few as can be: a
// dimension of size 1 needs none, and neighbours that every tensor crosses with one stride are merged into one.
template <int kTensors>
struct Loops {
  Loops() = default;
  Loops(const Shape& shape, const TensorLayout* const (&tensors)[kTensors]) {
    for (int axis = 0; axis < shape.rank(); ++axis) {
      const int64_t size = shape[axis];
      if (size == 1) continue;
      int64_t step[kTensors];
      bool merges = rank > 0;
      for (int k = 0; k < kTensors; ++k) {
        const int own_axis = axis - (shape.rank() - tensors[k]->shape.rank());
        const bool repeats = own_axis < 0 || tensors[k]->shape[own_axis] == 1;
        step[k] = repeats ? 0 : tensors[k]->strides[own_axis];
        merges = merges && strides[rank - 1][k] == step[k] * size;
      }
      const int at = merges ? rank - 1 : rank++;
      sizes[at] = merges ? sizes[at] * size : size;
      for (int k = 0; k < kTensors; ++k) strides[at][k] = step[k];
    }
  }

  // The innermost loop; for a single element, a loop of one iteration.
  int inner() const { return rank == 0 ? 0 : rank - 1; }

  int rank = 0;
  int64_t sizes[kMaxRank] = {1};  // from the outermost loop to the innermost
  int64_t strides[kMaxRank][kTensors] = {};
};

}  // namespace gradfuse
