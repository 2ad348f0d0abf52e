#include "gradfuse/ops/apply_adam_w.h"

#include "kernels/adam_w_checks.h"
#include "kernels/update_checks.h"

namespace gradfuse {

Status Check(const ApplyAdamWArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckTensor("gradient", args.gradient, args.parameter));
  GRADFUSE_RETURN_IF_ERROR(CheckTensor("exp_avg", args.exp_avg, args.parameter));
  GRADFUSE_RETURN_IF_ERROR(CheckTensor("exp_avg_sq", args.exp_avg_sq, args.parameter));
  return CheckAdamW(args);
}

std::vector<Shape> OutputShapes(const ApplyAdamWArgs& args) { return std::vector<Shape>(3, args.parameter.shape); }

}  // namespace gradfuse
