#include "gradfuse/ops/gru_recurrence_backward.h"

#include "kernels/recurrence.h"

namespace gradfuse {

Status Check(const GruRecurrenceBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckSequence("grad_hidden", args.grad_hidden, 1));
  const RecurrenceSizes size(args.grad_hidden.shape, 1);
  GRADFUSE_RETURN_IF_ERROR(CheckShape("initial_h", args.initial_h, {size.batch, size.units}, " to fit grad_hidden"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("hidden", args.hidden, args.grad_hidden.shape, " to fit grad_hidden"));
  GRADFUSE_RETURN_IF_ERROR(
      CheckShape("gates", args.gates, {size.steps, size.batch, 4 * size.units}, " to fit grad_hidden"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("weight", args.weight, {3 * size.units, size.units}, " to fit grad_hidden"));
  return CheckFlag("reverse", args.reverse);
}

std::vector<Shape> OutputShapes(const GruRecurrenceBackwardArgs& args) {
  const RecurrenceSizes size(args.grad_hidden.shape, 1);
  const Shape of_gates{size.steps, size.batch, 3 * size.units};
  return {of_gates, args.initial_h.shape, of_gates};
}

}  // namespace gradfuse
