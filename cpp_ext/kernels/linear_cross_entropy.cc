#include "gradfuse/ops/linear_cross_entropy.h"

#include <limits>
#include <string>

#include "kernels/checks.h"
#include "kernels/cross_entropy.h"

namespace gradfuse {

Status Check(const LinearCrossEntropyArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckOptions(args));
  GRADFUSE_EXPECT(args.softcap >= 0 && args.softcap <= std::numeric_limits<float>::max(), "softcap",
                  Describe(args.softcap), "0 or a positive number");
  GRADFUSE_RETURN_IF_ERROR(CheckMask(args.output_mask, 5));
  GRADFUSE_EXPECT(args.input.shape.rank() == 2, "input", Describe(args.input), "shape (N,H)");
  const Shape& weight = args.linear_weight.shape;
  GRADFUSE_EXPECT(weight.rank() == 2 && weight[0] > 0 && weight[1] == args.Features(), "linear_weight",
                  Describe(args.linear_weight), "shape (C," + std::to_string(args.Features()) + ") with C > 0");
  GRADFUSE_RETURN_IF_ERROR(CheckShape("target", args.target, {args.Rows()}, ", one class a row of input"));
  const Shape per_class{args.Classes()};
  GRADFUSE_RETURN_IF_ERROR(CheckShape("linear_bias", args.linear_bias, per_class, ", one number a class"));
  if (args.weight) {
    const DType computed = args.input.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    GRADFUSE_EXPECT(args.weight->dtype == computed, "weight", Name(args.weight->dtype),
                    std::string(Name(computed)) + ", as input is " + Name(args.input.dtype));
    GRADFUSE_RETURN_IF_ERROR(CheckShape("weight", *args.weight, per_class, ", one weight a class"));
  }
  if (args.grad_loss) GRADFUSE_RETURN_IF_ERROR(CheckGradLoss(args, *args.grad_loss, args.Rows()));
  if (args.grad_logsumexp) {
    GRADFUSE_RETURN_IF_ERROR(CheckShape("grad_logsumexp", *args.grad_logsumexp, {args.Rows()}, ", one value a row"));
  }
  return args.target.on_host ? CheckTargets(args, args.Classes()) : Status();
}

std::vector<Shape> OutputShapes(const LinearCrossEntropyArgs& args) {
  const Shape losses = args.reduction == "none" ? args.target.shape : Shape{};
  return Masked(args.output_mask,
                {losses, args.input.shape, args.linear_weight.shape, {args.Classes()}, args.target.shape});
}

}  // namespace gradfuse
