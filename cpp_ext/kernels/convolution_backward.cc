#include "gradfuse/ops/convolution_backward.h"

#include <string>

#include "kernels/checks.h"
#include "kernels/convolution_checks.h"

namespace gradfuse {
Status Check(const ConvolutionBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckConvolution(args));
  const int rank = args.input.shape.rank();
  const int spatial = rank - 2;
  GRADFUSE_EXPECT(args.grad_output.shape.rank() == rank, "grad_output", Describe(args.grad_output),
                  std::to_string(rank) + " dimensions as input");
  GRADFUSE_RETURN_IF_ERROR(CheckMask(args.output_mask, 3));
  GRADFUSE_RETURN_IF_ERROR(CheckWeight(args, args.grad_output.shape[1]));
  Shape output = args.grad_output.shape;
  output[0] = args.input.shape[0];
  for (int axis = 0; axis < spatial; ++axis) output[axis + 2] = ConvolvedSize(args, spatial, axis);
  return CheckShape("grad_output", args.grad_output, output, " as input and weight give");
}

std::vector<Shape> OutputShapes(const ConvolutionBackwardArgs& args) {
  return Masked(args.output_mask, {args.input.shape, args.weight.shape, {args.grad_output.shape[1]}});
}

}  // namespace gradfuse
