#include "gradfuse/ops/apply_sgd.h"

#include "kernels/checks.h"

namespace gradfuse {

Status Check(const ApplySgdArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  const Shape& shape = args.parameter.shape;
  GRADFUSE_RETURN_IF_ERROR(CheckShape("gradient", args.gradient, shape, ", as parameter"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("learning_rate", args.learning_rate, {}));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("momentum_buffer", args.momentum_buffer, shape, ", as parameter"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("gradient_scale", args.gradient_scale, {}));
  GRADFUSE_EXPECT(args.momentum >= 0, "momentum", Describe(args.momentum), "0 or more");
  GRADFUSE_EXPECT(args.weight_decay >= 0, "weight_decay", Describe(args.weight_decay), "0 or more");
  GRADFUSE_RETURN_IF_ERROR(CheckFlag("nesterov", args.nesterov));
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
