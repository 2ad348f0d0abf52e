#pragma once

#include "kernels/checks.h"

namespace gradfuse {

// Checks of scalars and attributes that updates by AdamW share.
template <class Args>
Status CheckAdamW(const Args& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckShape("learning_rate", args.learning_rate, {}));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("step", args.step, {}));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("gradient_scale", args.gradient_scale, {}));
  GRADFUSE_EXPECT(args.beta1 >= 0 && args.beta1 < 1, "beta1", Describe(args.beta1), "a number in [0, 1)");
  GRADFUSE_EXPECT(args.beta2 >= 0 && args.beta2 < 1, "beta2", Describe(args.beta2), "a number in [0, 1)");
  GRADFUSE_EXPECT(args.epsilon >= 0, "epsilon", Describe(args.epsilon), "0 or more");
  GRADFUSE_EXPECT(args.weight_decay >= 0, "weight_decay", Describe(args.weight_decay), "0 or more");
  return CheckFlag("decoupled_weight_decay", args.decoupled_weight_decay);
}

}  // namespace gradfuse
