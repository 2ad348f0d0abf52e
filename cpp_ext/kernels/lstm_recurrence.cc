#include "gradfuse/ops/lstm_recurrence.h"

#include "kernels/recurrence.h"

namespace gradfuse {

Status Check(const LstmRecurrenceArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckSequence("input", args.input, 4));
  const RecurrenceSizes size(args.input.shape, 4);
  const Shape state{size.batch, size.units};
  GRADFUSE_RETURN_IF_ERROR(CheckShape("initial_h", args.initial_h, state, " to fit input"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("initial_c", args.initial_c, state, " to fit input"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("weight", args.weight, {4 * size.units, size.units}, " to fit input"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("bias", args.bias, {4 * size.units}, " to fit input"));
  return CheckFlag("reverse", args.reverse);
}

std::vector<Shape> OutputShapes(const LstmRecurrenceArgs& args) {
  const RecurrenceSizes size(args.input.shape, 4);
  const Shape states{size.steps, size.batch, size.units};
  return {states, states, args.input.shape};
}

}  // namespace gradfuse
