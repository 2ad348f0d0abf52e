#include "gradfuse/ops/convolution.h"

#include <string>

#include "kernels/checks.h"
#include "kernels/convolution_checks.h"

namespace gradfuse {

Status Check(const ConvolutionArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckConvolution(args));
  GRADFUSE_RETURN_IF_ERROR(CheckFlag("relu", args.relu));
  GRADFUSE_EXPECT(args.groups >= 1 && args.groups <= kMostInSpace, "groups", std::to_string(args.groups),
                  "a divisor of the channels");
  GRADFUSE_EXPECT(args.weight.shape[0] <= kMostInSpace && args.weight.shape[1] <= kMostInSpace, "weight",
                  Describe(args.weight), "at most 2147483647 channels");
  const Shape channels{args.transposed != 0 ? args.weight.shape[1] * args.groups : args.weight.shape[0]};
  GRADFUSE_RETURN_IF_ERROR(CheckWeight(args, channels[0]));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("bias", args.bias, channels, " as the channels of weight"));
  const int spatial = args.input.shape.rank() - 2;
  for (int axis = 0; axis < spatial; ++axis) {
    GRADFUSE_EXPECT(ConvolvedSize(args, spatial, axis) >= 1, "input", Describe(args.input),
                    "room for the kernel along dimension " + std::to_string(axis + 2));
  }
  return {};
}

std::vector<Shape> OutputShapes(const ConvolutionArgs& args) {
  const int spatial = args.input.shape.rank() - 2;
  Shape output = args.input.shape;
  output[1] = args.transposed != 0 ? args.weight.shape[1] * args.groups : args.weight.shape[0];
  for (int axis = 0; axis < spatial; ++axis) output[axis + 2] = ConvolvedSize(args, spatial, axis);
  return {output};
}

}  // namespace gradfuse
