#include "gradfuse/ops/gru_recurrence.h"

#include "kernels/recurrence.h"

namespace gradfuse {

Status Check(const GruRecurrenceArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckSequence("input", args.input, 3));
  const RecurrenceSizes size(args.input.shape, 3);
  GRADFUSE_RETURN_IF_ERROR(CheckShape("initial_h", args.initial_h, {size.batch, size.units}, " to fit input"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("weight", args.weight, {3 * size.units, size.units}, " to fit input"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("bias", args.bias, {3 * size.units}, " to fit input"));
  return CheckFlag("reverse", args.reverse);
}

std::vector<Shape> OutputShapes(const GruRecurrenceArgs& args) {
  const RecurrenceSizes size(args.input.shape, 3);
  return {{size.steps, size.batch, size.units}, {size.steps, size.batch, 4 * size.units}};
}

}  // namespace gradfuse
