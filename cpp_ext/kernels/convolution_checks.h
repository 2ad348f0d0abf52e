#pragma once

#include <algorithm>
#include <string>

#include "gradfuse/signature.h"
#include "kernels/checks.h"
#include "kernels/convolution_geometry.h"
#include "kernels/spatial_numbers.h"

// The checks that the convolution operators share.
namespace gradfuse {

// The size of a convolution's result along a spatial dimension; below 1 if the kernel does not fit.
template <class Args>
int64_t ConvolvedSize(const Args& args, int spatial, int axis) {
  const int64_t size = args.input.shape[axis + 2];
  const int64_t reach = At(args.dilation, axis) * (args.weight.shape[axis + 2] - 1) + 1;
  const int64_t padding = At(args.padding, axis) + PaddingAtEnd(args.padding, spatial, axis);
  const int64_t stride = At(args.stride, axis);
  if (args.transposed != 0) return (size - 1) * stride - padding + reach + At(args.output_padding, axis);
  const int64_t room = size + padding - reach;
  return room < 0 ? 0 : room / stride + 1;
}

// Whether two factors are multiplied as bfloat16: they are, or are rounded to it.
template <class Args>
bool MultipliesBFloat16(const Args& args, const Tensor& left, const Tensor& right) {
  return args.factors_in_bfloat16 != 0 || (left.dtype == DType::kBFloat16 && right.dtype == DType::kBFloat16);
}

// Ranks and attributes.
template <class Args>
Status CheckConvolution(const Args& args) {
  const int rank = args.input.shape.rank();
  const int spatial = rank - 2;
  GRADFUSE_EXPECT(spatial >= 1 && spatial <= ConvolutionGeometry::kSpatial, "input", Describe(args.input),
                  "3 to 5 dimensions (N,C,...)");
  GRADFUSE_EXPECT(args.weight.shape.rank() == rank, "weight", Describe(args.weight),
                  std::to_string(rank) + " dimensions as input");
  GRADFUSE_RETURN_IF_ERROR(CheckFlag("transposed", args.transposed));
  GRADFUSE_RETURN_IF_ERROR(CheckFlag("factors_in_bfloat16", args.factors_in_bfloat16));
  GRADFUSE_EXPECT(args.factors_in_bfloat16 == 0 || args.weight.dtype != DType::kFloat64, "factors_in_bfloat16",
                  std::to_string(args.factors_in_bfloat16), "0 for float64");
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("stride", args.stride, spatial, false, 1));
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("padding", args.padding, spatial, true, 0));
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("dilation", args.dilation, spatial, false, 1));
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("output_padding", args.output_padding, spatial, false, 0));
  const bool transposed = args.transposed == 1;
  for (int axis = 0; axis < spatial; ++axis) {
    const int64_t most = transposed ? std::max(At(args.stride, axis), At(args.dilation, axis)) - 1 : 0;
    GRADFUSE_EXPECT(At(args.output_padding, axis) <= most, "output_padding", Describe(args.output_padding),
                    transposed ? "numbers below stride or dilation" : "0 without transposed");
  }
  return {};
}

// Channels and sizes, with `outputs` channels of the result.
template <class Args>
Status CheckWeight(const Args& args, int64_t outputs) {
  const bool transposed = args.transposed == 1;
  const int64_t channels = args.input.shape[1];
  GRADFUSE_EXPECT(args.groups >= 1 && channels % args.groups == 0 && outputs % args.groups == 0, "groups",
                  std::to_string(args.groups),
                  "a divisor of " + std::to_string(channels) + " and " + std::to_string(outputs) + " channels");
  Shape weight = args.weight.shape;
  weight[0] = transposed ? channels : outputs;
  weight[1] = (transposed ? outputs : channels) / args.groups;
  GRADFUSE_EXPECT(args.weight.shape == weight, "weight", Describe(args.weight),
                  Describe(args.weight.dtype, weight) + " as " + std::to_string(args.groups) +
                      (args.groups == 1 ? " group" : " groups") + " of channels");
  for (int axis = 2; axis < weight.rank(); ++axis) {
    GRADFUSE_EXPECT(weight[axis] >= 1 && weight[axis] <= kMostInSpace, "weight", Describe(args.weight),
                    "a kernel of 1 to 2147483647 elements along each dimension");
    GRADFUSE_EXPECT(args.input.shape[axis] <= kMostInSpace, "input", Describe(args.input),
                    "at most 2147483647 elements along each spatial dimension");
  }
  return {};
}

}  // namespace gradfuse
