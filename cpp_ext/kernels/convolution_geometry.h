#pragma once

#include <cstdint>

#include "gradfuse/ops/convolution_backward.h"

namespace gradfuse {

// What the kernels need to know of checked arguments, of any number of spatial dimensions: three, of which the first
// have size 1 where there are fewer.
//
// A convolution has a small side, one position of which is a window, and a large side, which windows lie in: its output
// and its input, or of a transposed convolution its input and its output. Window o meets element
// o stride - padding + k dilation of the large side at k of the kernel.
struct ConvolutionGeometry {
  static constexpr int kSpatial = ConvolutionBackwardArgs::kMaxSpatial;

  explicit ConvolutionGeometry(const ConvolutionBackwardArgs& args);

  int64_t batch;
  int64_t groups;
  int64_t small_channels;  // of a group
  int64_t large_channels;  // of a group
  int64_t small[kSpatial] = {};
  int64_t large[kSpatial] = {};
  int64_t kernel[kSpatial] = {};
  int64_t stride[kSpatial] = {};
  int64_t padding[kSpatial] = {};  // at the beginning
  int64_t dilation[kSpatial] = {};

  int64_t small_size;
  int64_t large_size;
  int64_t kernel_size;
};

}  // namespace gradfuse
