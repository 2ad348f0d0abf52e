#include "gradfuse/ops/scaled_masked_softmax_backward.h"

#include "kernels/checks.h"

namespace gradfuse {

Status Check(const ScaledMaskedSoftmaxBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  if (args.fix_triu_mask != 0) {
    return {StatusCode::kNotSupported, "fix_triu_mask is " + std::to_string(args.fix_triu_mask) +
                                           "; expected 0: a fixed triangular mask is not supported"};
  }
  const Shape& shape = args.grad_output.shape;
  GRADFUSE_EXPECT(shape.rank() == 4, "grad_output", Describe(args.grad_output), "4 dimensions (B,H,S1,S2)");
  GRADFUSE_RETURN_IF_ERROR(CheckShape("y", args.y, shape, " as grad_output"));
  if (args.mask) {
    const Shape& mask = args.mask->shape;
    const bool fits = mask.rank() == 4 && (mask[0] == shape[0] || mask[0] == 1) &&
                      (mask[1] == shape[1] || mask[1] == 1) && mask[2] == shape[2] && mask[3] == shape[3];
    GRADFUSE_EXPECT(fits, "mask", Describe(*args.mask),
                    Describe(args.mask->dtype, shape) + ", the first two dimensions or 1");
  }
  return {};
}

std::vector<Shape> OutputShapes(const ScaledMaskedSoftmaxBackwardArgs& args) { return {args.grad_output.shape}; }

}  // namespace gradfuse
