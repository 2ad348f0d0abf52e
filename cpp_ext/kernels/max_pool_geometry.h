#pragma once

#include <cstdint>

#include "gradfuse/ops/max_pool_backward.h"

namespace gradfuse {

// What the kernels need of checked arguments, always with three spatial dimensions: if there are fewer, the first //
// have size 1.
struct MaxPoolGeometry {
  static constexpr int kSpatial = MaxPoolBackwardArgs::kMaxSpatial;

  explicit MaxPoolGeometry(const MaxPoolBackwardArgs& args);

  int64_t planes;                  // items times channels
  int64_t windows[kSpatial] = {};  // of a plane
  int64_t sizes[kSpatial] = {};    // of a plane of the input
  int64_t kernel[kSpatial] = {};
  int64_t stride[kSpatial] = {};
  int64_t padding[kSpatial] = {};  // at the beginning
  int64_t dilation[kSpatial] = {};

  int64_t window_count = 1;  // of a plane
  int64_t plane_size = 1;    // of the input
};

}  // namespace gradfuse
