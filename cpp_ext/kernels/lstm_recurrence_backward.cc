#include "gradfuse/ops/lstm_recurrence_backward.h"

#include "kernels/recurrence.h"

namespace gradfuse {

Status Check(const LstmRecurrenceBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckSequence("grad_hidden", args.grad_hidden, 1));
  const RecurrenceSizes size(args.grad_hidden.shape, 1);
  const Shape& states = args.grad_hidden.shape;
  GRADFUSE_RETURN_IF_ERROR(CheckShape("grad_cell", args.grad_cell, states, " to fit grad_hidden"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("initial_c", args.initial_c, {size.batch, size.units}, " to fit grad_hidden"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("cell", args.cell, states, " to fit grad_hidden"));
  GRADFUSE_RETURN_IF_ERROR(
      CheckShape("gates", args.gates, {size.steps, size.batch, 4 * size.units}, " to fit grad_hidden"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("weight", args.weight, {4 * size.units, size.units}, " to fit grad_hidden"));
  return CheckFlag("reverse", args.reverse);
}

std::vector<Shape> OutputShapes(const LstmRecurrenceBackwardArgs& args) {
  return {args.gates.shape, args.initial_c.shape, args.initial_c.shape};
}

}  // namespace gradfuse
