#include "gradfuse/ops/ctc_loss_backward.h"

#include "kernels/checks.h"
#include "kernels/ctc_common.h"

namespace gradfuse {

Status Check(const CtcLossBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(
      CheckCtc(args.log_probs, args.targets, args.input_lengths, args.target_lengths, args.blank, args.zero_infinity));
  const int64_t steps = args.log_probs.shape[0];
  const Shape per_item{args.log_probs.shape[1]};
  const char* const why = ", one value an item";
  GRADFUSE_RETURN_IF_ERROR(CheckShape("grad_out", args.grad_out, per_item, why));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("neg_log_likelihood", args.neg_log_likelihood, per_item, why));
  const Shape& alpha = args.log_alpha.shape;
  const bool known = args.target_lengths.on_host;
  const int64_t states = known ? 2 * LongestTarget(args.target_lengths) + 1 : 1;
  GRADFUSE_EXPECT(alpha.rank() == 3 && alpha[0] == per_item[0] && alpha[1] == steps && alpha[2] >= states, "log_alpha",
                  Describe(args.log_alpha),
                  "shape (" + std::to_string(per_item[0]) + "," + std::to_string(steps) + ",X) with X at least " +
                      (known ? std::to_string(states) + ", " : "") + "twice the longest target and one");
  return {};
}

std::vector<Shape> OutputShapes(const CtcLossBackwardArgs& args) { return {args.log_probs.shape}; }

}  // namespace gradfuse
