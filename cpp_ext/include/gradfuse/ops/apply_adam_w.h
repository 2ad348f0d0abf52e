#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// One update by AdamW, or by Adam, as torch.optim's for one tensor. With g = gradient_scale gradient, t = step + 1:
//   parameter *= 1 - learning_rate weight_decay  where the decay is decoupled, else  g += weight_decay parameter
//   new_exp_avg = exp_avg + (1 - beta1) (g - exp_avg)
//   new_exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2
//   new_parameter = parameter - learning_rate / (1 - beta1^t) new_exp_avg /
//                               (sqrt(new_exp_avg_sq) / sqrt(1 - beta2^t) + epsilon)
// What depends on scalars alone is computed in float64, with beta1 and beta2 rounded to seven decimals.
struct ApplyAdamWArgs {
  static constexpr char kName[] = "ApplyAdamW";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor parameter;
  Tensor gradient;  // this and the next two: the shape of parameter
  Tensor exp_avg;
  Tensor exp_avg_sq;
  Tensor learning_rate;                  // ()
  Tensor step;                           // (): the updates that were done before
  std::optional<Tensor> gradient_scale;  // ()
  float beta1 = 0.9F;
  float beta2 = 0.999F;
  float epsilon = 1e-8F;
  float weight_decay = 0.01F;
  int64_t decoupled_weight_decay = 1;
  MutableTensor new_parameter;
  MutableTensor new_exp_avg;
  MutableTensor new_exp_avg_sq;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("parameter", self.parameter, kT);
    visitor.Input("gradient", self.gradient, kT);
    visitor.Input("exp_avg", self.exp_avg, kT);
    visitor.Input("exp_avg_sq", self.exp_avg_sq, kT);
    visitor.Input("learning_rate", self.learning_rate, DType::kFloat32);
    visitor.Input("step", self.step, DType::kInt64);
    visitor.Input("gradient_scale", self.gradient_scale, DType::kFloat32);
    visitor.Attribute("beta1", self.beta1);
    visitor.Attribute("beta2", self.beta2);
    visitor.Attribute("epsilon", self.epsilon);
    visitor.Attribute("weight_decay", self.weight_decay);
    visitor.Attribute("decoupled_weight_decay", self.decoupled_weight_decay);
    visitor.Output("new_parameter", self.new_parameter, kT);
    visitor.Output("new_exp_avg", self.new_exp_avg, kT);
    visitor.Output("new_exp_avg_sq", self.new_exp_avg_sq, kT);
  }
};

GRADFUSE_DECLARE_OP(ApplyAdamWArgs)

}  // namespace gradfuse
