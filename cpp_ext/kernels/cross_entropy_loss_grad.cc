#include "gradfuse/ops/cross_entropy_loss_grad.h"

#include "kernels/checks.h"
#include "kernels/cross_entropy.h"

namespace gradfuse {
Status Check(const CrossEntropyLossGradArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckOptions(args));
  if (args.grad_zloss || args.lse_for_zloss) {
    return {StatusCode::kNotSupported, std::string(args.grad_zloss ? "grad_zloss" : "lse_for_zloss") +
                                           " is given; expected none: the z-loss is not supported"};
  }
  if (args.lse_square_scale_for_zloss != 0) {
    return {StatusCode::kNotSupported, "lse_square_scale_for_zloss is " + Describe(args.lse_square_scale_for_zloss) +
                                           "; expected 0: the z-loss is not supported"};
  }

  const Shape& log_prob = args.log_prob.shape;
  GRADFUSE_EXPECT(log_prob.rank() == 2 && log_prob[1] > 0, "log_prob", Describe(args.log_prob),
                  "shape (N,C) with C > 0");
  GRADFUSE_RETURN_IF_ERROR(CheckGradLoss(args, args.grad_loss, log_prob[0]));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("target", args.target, {log_prob[0]}, ", one class a row of log_prob"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("weight", args.weight, {log_prob[1]}, ", one weight a class of log_prob"));
  return args.target.on_host ? CheckTargets(args, log_prob[1]) : Status();
}

std::vector<Shape> OutputShapes(const CrossEntropyLossGradArgs& args) { return {args.log_prob.shape}; }

}  // namespace gradfuse
