#include "gradfuse/ops/ctc_loss.h"

#include "kernels/ctc_common.h"

namespace gradfuse {

Status Check(const CtcLossArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  return CheckCtc(args.log_probs, args.targets, args.input_lengths, args.target_lengths, args.blank,
                  args.zero_infinity);
}

std::vector<Shape> OutputShapes(const CtcLossArgs& args) {
  const int64_t steps = args.log_probs.shape[0];
  const int64_t items = args.log_probs.shape[1];
  return {{items}, {items, steps, 2 * LongestTarget(args.target_lengths) + 1}};
}

}  // namespace gradfuse
