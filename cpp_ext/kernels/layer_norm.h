#pragma once

#include <cstdint>

#include "gradfuse/tensor.h"

namespace gradfuse {

// A tensor as `count` rows of `size` elements: those of the axes from `axis` on.
struct NormalizedRows {
  NormalizedRows(const Shape& shape, int64_t axis)
      : first(static_cast<int>(axis < 0 ? axis + shape.rank() : axis)),
        inner(shape.dims() + first, static_cast<size_t>(shape.rank() - first)),
        size(inner.NumElements()) {
    for (int i = 0; i < first; ++i) count *= shape[i];
  }

  int first;    // of the normalized axes
  Shape inner;  // their sizes
  int64_t size;
  int64_t count = 1;
};

}  // namespace gradfuse
