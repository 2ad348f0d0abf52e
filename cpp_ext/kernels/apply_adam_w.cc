#include "gradfuse/ops/apply_adam_w.h"

#include "kernels/update_checks.h"

namespace gradfuse {
namespace {

Status CheckBeta(const char* name, float beta) {
  GRADFUSE_EXPECT(beta >= 0 && beta < 1, name, Describe(beta), "a number in [0, 1)");
  return {};
}

Status CheckNotNegative(const char* name, float number) {
  GRADFUSE_EXPECT(number >= 0, name, Describe(number), "0 or more");
  return {};
}

}  // namespace

Status Check(const ApplyAdamWArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckTensor("gradient", args.gradient, args.parameter));
  GRADFUSE_RETURN_IF_ERROR(CheckTensor("exp_avg", args.exp_avg, args.parameter));
  GRADFUSE_RETURN_IF_ERROR(CheckTensor("exp_avg_sq", args.exp_avg_sq, args.parameter));
  GRADFUSE_RETURN_IF_ERROR(CheckScalar("learning_rate", args.learning_rate));
  GRADFUSE_RETURN_IF_ERROR(CheckScalar("step", args.step));
  if (args.gradient_scale) GRADFUSE_RETURN_IF_ERROR(CheckScalar("gradient_scale", *args.gradient_scale));
  GRADFUSE_RETURN_IF_ERROR(CheckBeta("beta1", args.beta1));
  GRADFUSE_RETURN_IF_ERROR(CheckBeta("beta2", args.beta2));
  GRADFUSE_RETURN_IF_ERROR(CheckNotNegative("epsilon", args.epsilon));
  GRADFUSE_RETURN_IF_ERROR(CheckNotNegative("weight_decay", args.weight_decay));
  GRADFUSE_EXPECT(args.decoupled_weight_decay == 0 || args.decoupled_weight_decay == 1, "decoupled_weight_decay",
                  std::to_string(args.decoupled_weight_decay), "0 or 1");
  return {};
}

std::vector<Shape> OutputShapes(const ApplyAdamWArgs& args) { return std::vector<Shape>(3, args.parameter.shape); }

}  // namespace gradfuse
