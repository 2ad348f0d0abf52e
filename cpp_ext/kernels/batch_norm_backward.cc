#include "gradfuse/ops/batch_norm_backward.h"

#include "kernels/checks.h"

namespace gradfuse {

Status Check(const BatchNormBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  const Shape& whole = args.input.shape;
  GRADFUSE_EXPECT(whole.rank() >= 2, "input", Describe(args.input), "2 to 8 dimensions (N,C,...)");
  GRADFUSE_RETURN_IF_ERROR(CheckShape("grad_output", args.grad_output, whole, " as input"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("relu_output", args.relu_output, whole, " as input"));
  const Shape channels{whole[1]};
  const char* const why = " as the channels of input";
  GRADFUSE_RETURN_IF_ERROR(CheckShape("weight", args.weight, channels, why));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("save_mean", args.save_mean, channels, why));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("save_invstd", args.save_invstd, channels, why));
  return CheckMask(args.output_mask, 3);
}

std::vector<Shape> OutputShapes(const BatchNormBackwardArgs& args) {
  const Shape channels{args.input.shape[1]};
  return Masked(args.output_mask, {args.input.shape, channels, channels});
}

}  // namespace gradfuse
