#pragma once

#include <cstdint>

#include "gradfuse/signature.h"
#include "kernels/spatial_numbers.h"

namespace gradfuse {

// What the kernels need of checked arguments, always with three spatial dimensions: if there are fewer, the first //
// have size 1.
//
// A convolution has a small side, one position of which is a window, and a large side, which windows lie in: its output
// and its input, or of a transposed convolution its input and its output. Window o meets element
// o stride - padding + k dilation of the large side at k of the kernel.
struct ConvolutionGeometry {
  static constexpr int kSpatial = 3;

  // Of the checked arguments of an operator on convolutions with this input and this result.
  template <class Args>
  ConvolutionGeometry(const Args& args, const Shape& input, const Shape& output)
      : batch(input[0]), groups(args.groups) {
    const bool transposed = args.transposed != 0;
    const Shape& small_shape = transposed ? input : output;
    const Shape& large_shape = transposed ? output : input;
    small_channels = small_shape[1] / groups;
    large_channels = large_shape[1] / groups;
    const int spatial = input.rank() - 2;
    for (int i = 0; i < kSpatial; ++i) {
      const int axis = i - (kSpatial - spatial);
      const bool is_there = axis >= 0;
      small[i] = is_there ? small_shape[axis + 2] : 1;
      large[i] = is_there ? large_shape[axis + 2] : 1;
      kernel[i] = is_there ? args.weight.shape[axis + 2] : 1;
      stride[i] = is_there ? At(args.stride, axis) : 1;
      padding[i] = is_there ? At(args.padding, axis) : 0;
      dilation[i] = is_there ? At(args.dilation, axis) : 1;
    }
    small_size = small[0] * small[1] * small[2];
    large_size = large[0] * large[1] * large[2];
    kernel_size = kernel[0] * kernel[1] * kernel[2];
  }

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
  bool pairs = false;  // whether numbers are pairs of bfloat16, of two channels or two items: see convolution_pairs.h
};

}  // namespace gradfuse
