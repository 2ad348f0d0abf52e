#include "gradfuse/ops/apply_adam_w.h"

#include "kernels/adam_w_checks.h"
#include "kernels/checks.h"

namespace gradfuse {

Status Check(const ApplyAdamWArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  const Shape& shape = args.parameter.shape;
  GRADFUSE_RETURN_IF_ERROR(CheckShape("gradient", args.gradient, shape, ", as parameter"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("exp_avg", args.exp_avg, shape, ", as parameter"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("exp_avg_sq", args.exp_avg_sq, shape, ", as parameter"));
  return CheckAdamW(args);
}

std::vector<Shape> OutputShapes(const ApplyAdamWArgs& args) { return std::vector<Shape>(3, args.parameter.shape); }

}  // namespace gradfuse
