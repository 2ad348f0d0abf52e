#include "gradfuse/ops/convolution_backward.h"

#include <algorithm>
#include <string>

#include "kernels/convolution_geometry.h"
#include "kernels/spatial_numbers.h"

namespace gradfuse {
namespace {

// The size of grad_output along a spatial dimension.
int64_t OutputSize(const ConvolutionBackwardArgs& args, int spatial, int axis) {
  const int64_t size = args.input.shape[axis + 2];
  const int64_t reach = At(args.dilation, axis) * (args.weight.shape[axis + 2] - 1) + 1;
  const int64_t padding = At(args.padding, axis) + PaddingAtEnd(args.padding, spatial, axis);
  const int64_t stride = At(args.stride, axis);
  if (args.transposed != 0) return (size - 1) * stride - padding + reach + At(args.output_padding, axis);
  const int64_t room = size + padding - reach;
  return room < 0 ? 0 : room / stride + 1;
}

}  // namespace

Status Check(const ConvolutionBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  const int rank = args.input.shape.rank();
  const int spatial = rank - 2;
  GRADFUSE_EXPECT(spatial >= 1 && spatial <= ConvolutionBackwardArgs::kMaxSpatial, "input", Describe(args.input),
                  "3 to 5 dimensions (N,C,...)");
  for (const Tensor* tensor : {&args.grad_output, &args.weight}) {
    GRADFUSE_EXPECT(tensor->shape.rank() == rank, tensor == &args.weight ? "weight" : "grad_output", Describe(*tensor),
                    std::to_string(rank) + " dimensions as input");
  }
  GRADFUSE_EXPECT(args.transposed == 0 || args.transposed == 1, "transposed", std::to_string(args.transposed),
                  "0 or 1");
  const bool transposed = args.transposed == 1;
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("stride", args.stride, spatial, false, 1));
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("padding", args.padding, spatial, true, 0));
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("dilation", args.dilation, spatial, false, 1));
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("output_padding", args.output_padding, spatial, false, 0));
  const bool mask_fits = args.output_mask.size() == 3 && std::all_of(args.output_mask.begin(), args.output_mask.end(),
                                                                     [](int64_t one) { return one == 0 || one == 1; });
  GRADFUSE_EXPECT(mask_fits, "output_mask", Describe(args.output_mask), "3 numbers, 0 or 1");
  for (int axis = 0; axis < spatial; ++axis) {
    const int64_t most = transposed ? std::max(At(args.stride, axis), At(args.dilation, axis)) - 1 : 0;
    GRADFUSE_EXPECT(At(args.output_padding, axis) <= most, "output_padding", Describe(args.output_padding),
                    transposed ? "numbers below stride or dilation" : "0 without transposed");
  }

  const int64_t channels = args.input.shape[1];
  const int64_t outputs = args.grad_output.shape[1];
  GRADFUSE_EXPECT(args.groups >= 1 && channels % args.groups == 0 && outputs % args.groups == 0, "groups",
                  std::to_string(args.groups),
                  "a divisor of " + std::to_string(channels) + " and " + std::to_string(outputs) + " channels");
  Shape weight = args.weight.shape;
  weight[0] = transposed ? channels : outputs;
  weight[1] = (transposed ? outputs : channels) / args.groups;
  GRADFUSE_EXPECT(args.weight.shape == weight, "weight", Describe(args.weight),
                  Describe(args.weight.dtype, weight) + " as " + std::to_string(args.groups) +
                      (args.groups == 1 ? " group" : " groups") + " of channels");
  for (int axis = 0; axis < spatial; ++axis) {
    GRADFUSE_EXPECT(weight[axis + 2] >= 1 && weight[axis + 2] <= kMostInSpace, "weight", Describe(args.weight),
                    "a kernel of 1 to 2147483647 elements along each dimension");
    GRADFUSE_EXPECT(args.input.shape[axis + 2] <= kMostInSpace, "input", Describe(args.input),
                    "at most 2147483647 elements along each spatial dimension");
  }
  Shape output = args.grad_output.shape;
  output[0] = args.input.shape[0];
  for (int axis = 0; axis < spatial; ++axis) output[axis + 2] = OutputSize(args, spatial, axis);
  GRADFUSE_EXPECT(args.grad_output.shape == output, "grad_output", Describe(args.grad_output),
                  Describe(args.grad_output.dtype, output) + " as input and weight give");
  return {};
}

std::vector<Shape> OutputShapes(const ConvolutionBackwardArgs& args) {
  const Shape nothing{0};
  return {args.output_mask[0] != 0 ? args.input.shape : nothing, args.output_mask[1] != 0 ? args.weight.shape : nothing,
          args.output_mask[2] != 0 ? Shape{args.grad_output.shape[1]} : nothing};
}

ConvolutionGeometry::ConvolutionGeometry(const ConvolutionBackwardArgs& args)
    : batch(args.input.shape[0]), groups(args.groups) {
  const bool transposed = args.transposed != 0;
  const Shape& small_shape = transposed ? args.input.shape : args.grad_output.shape;
  const Shape& large_shape = transposed ? args.grad_output.shape : args.input.shape;
  small_channels = small_shape[1] / groups;
  large_channels = large_shape[1] / groups;
  const int spatial = args.input.shape.rank() - 2;
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

}  // namespace gradfuse
