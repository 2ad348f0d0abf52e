#include "gradfuse/ops/convolution_backward.h"

#include <algorithm>
#include <string>

#include "kernels/convolution_checks.h"

namespace gradfuse {
Status Check(const ConvolutionBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckConvolution(args));
  const int rank = args.input.shape.rank();
  const int spatial = rank - 2;
  GRADFUSE_EXPECT(args.grad_output.shape.rank() == rank, "grad_output", Describe(args.grad_output),
                  std::to_string(rank) + " dimensions as input");
  const bool mask_fits = args.output_mask.size() == 3 && std::all_of(args.output_mask.begin(), args.output_mask.end(),
                                                                     [](int64_t one) { return one == 0 || one == 1; });
  GRADFUSE_EXPECT(mask_fits, "output_mask", Describe(args.output_mask), "3 numbers, 0 or 1");
  GRADFUSE_RETURN_IF_ERROR(CheckWeight(args, args.grad_output.shape[1]));
  Shape output = args.grad_output.shape;
  output[0] = args.input.shape[0];
  for (int axis = 0; axis < spatial; ++axis) output[axis + 2] = ConvolvedSize(args, spatial, axis);
  GRADFUSE_EXPECT(args.grad_output.shape == output, "grad_output", Describe(args.grad_output),
                  Describe(args.grad_output.dtype, output) + " as input and weight give");
  return {};
}

std::vector<Shape> OutputShapes(const ConvolutionBackwardArgs& args) {
  const Shape nothing{0};
  return {args.output_mask[0] != 0 ? args.input.shape : nothing, args.output_mask[1] != 0 ? args.weight.shape : nothing,
          args.output_mask[2] != 0 ? Shape{args.grad_output.shape[1]} : nothing};
}

}  // namespace gradfuse
