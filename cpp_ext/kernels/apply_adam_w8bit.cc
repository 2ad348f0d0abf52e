#include "gradfuse/ops/apply_adam_w8bit.h"

#include "kernels/adam_w_checks.h"
#include "kernels/checks.h"
#include "kernels/dispatch.h"

namespace gradfuse {

Status Check(const ApplyAdamW8bitArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  const Shape& shape = args.parameter.shape;
  const Shape blocks{CeilDiv(args.parameter.NumElements(), ApplyAdamW8bitArgs::kBlock)};
  GRADFUSE_RETURN_IF_ERROR(CheckShape("gradient", args.gradient, shape, ", as parameter"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("exp_avg", args.exp_avg, shape));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("exp_avg_sq", args.exp_avg_sq, shape));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("exp_avg_scale", args.exp_avg_scale, blocks, ", one for 256 elements"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("exp_avg_sq_scale", args.exp_avg_sq_scale, blocks, ", one for 256 elements"));
  return CheckAdamW(args);
}

std::vector<Shape> OutputShapes(const ApplyAdamW8bitArgs& args) {
  const Shape& whole = args.parameter.shape;
  const Shape& blocks = args.exp_avg_scale.shape;
  return {whole, whole, whole, blocks, blocks};
}

}  // namespace gradfuse
