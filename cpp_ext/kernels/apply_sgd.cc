#include "gradfuse/ops/apply_sgd.h"

#include "kernels/update_checks.h"

namespace gradfuse {

Status Check(const ApplySgdArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckTensor("gradient", args.gradient, args.parameter));
  GRADFUSE_RETURN_IF_ERROR(CheckScalar("learning_rate", args.learning_rate));
  if (args.momentum_buffer) {
    GRADFUSE_RETURN_IF_ERROR(CheckTensor("momentum_buffer", *args.momentum_buffer, args.parameter));
  }
  if (args.gradient_scale) GRADFUSE_RETURN_IF_ERROR(CheckScalar("gradient_scale", *args.gradient_scale));
  GRADFUSE_EXPECT(args.momentum >= 0, "momentum", Describe(args.momentum), "0 or more");
  GRADFUSE_EXPECT(args.weight_decay >= 0, "weight_decay", Describe(args.weight_decay), "0 or more");
  GRADFUSE_EXPECT(args.nesterov == 0 || args.nesterov == 1, "nesterov", std::to_string(args.nesterov), "0 or 1");
  if (!args.momentum_buffer) {
    GRADFUSE_EXPECT(args.momentum == 0, "momentum", Describe(args.momentum), "0, as momentum_buffer is absent");
    GRADFUSE_EXPECT(args.nesterov == 0, "nesterov", "1", "0, as momentum_buffer is absent");
  }
  return {};
}

std::vector<Shape> OutputShapes(const ApplySgdArgs& args) {
  return {args.parameter.shape, args.momentum_buffer ? args.parameter.shape : Shape{0}};
}

}  // namespace gradfuse
