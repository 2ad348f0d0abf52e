#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// One update by AdamW, or by Adam, with state in 8 bits: blocks of 256 elements in row-major order have a scale each,
//   mean = (c - 128) |c - 128| exp_avg_scale / 127^2      for a code c of exp_avg
//   root = (c + 1)^2 exp_avg_sq_scale / 256^2             for one of exp_avg_sq, whose root is kept.
// With g = gradient_scale gradient, t = step + 1:
//   parameter *= 1 - learning_rate weight_decay  where the decay is decoupled, else  g += weight_decay parameter
//   mean = beta1 mean + (1 - beta1) g
//   root = sqrt(beta2 root^2 + (1 - beta2) g^2)
//   new_parameter = parameter - learning_rate / (1 - beta1^t) mean / (root / sqrt(1 - beta2^t) + epsilon)
// The new scales are the largest |mean| and root of a block, and the new codes the nearest. What is not finite makes
// both scales of its block NaN. Every operation is rounded, so that results are the same bits everywhere.
struct ApplyAdamW8bitArgs {
  static constexpr char kName[] = "ApplyAdamW8bit";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  static constexpr int64_t kBlock = 256;

  Tensor parameter;
  Tensor gradient;  // this and the next two: the shape of parameter
  Tensor exp_avg;
  Tensor exp_avg_sq;
  Tensor exp_avg_scale;                  // (blocks)
  Tensor exp_avg_sq_scale;               // (blocks)
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
  MutableTensor new_exp_avg_scale;
  MutableTensor new_exp_avg_sq_scale;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("parameter", self.parameter, kT);
    visitor.Input("gradient", self.gradient, kT);
    visitor.Input("exp_avg", self.exp_avg, DType::kUInt8);
    visitor.Input("exp_avg_sq", self.exp_avg_sq, DType::kUInt8);
    visitor.Input("exp_avg_scale", self.exp_avg_scale, DType::kFloat32);
    visitor.Input("exp_avg_sq_scale", self.exp_avg_sq_scale, DType::kFloat32);
    visitor.Input("learning_rate", self.learning_rate, DType::kFloat32);
    visitor.Input("step", self.step, DType::kInt64);
    visitor.Input("gradient_scale", self.gradient_scale, DType::kFloat32);
    visitor.Attribute("beta1", self.beta1);
    visitor.Attribute("beta2", self.beta2);
    visitor.Attribute("epsilon", self.epsilon);
    visitor.Attribute("weight_decay", self.weight_decay);
    visitor.Attribute("decoupled_weight_decay", self.decoupled_weight_decay);
    visitor.Output("new_parameter", self.new_parameter, kT);
    visitor.Output("new_exp_avg", self.new_exp_avg, DType::kUInt8);
    visitor.Output("new_exp_avg_sq", self.new_exp_avg_sq, DType::kUInt8);
    visitor.Output("new_exp_avg_scale", self.new_exp_avg_scale, DType::kFloat32);
    visitor.Output("new_exp_avg_sq_scale", self.new_exp_avg_sq_scale, DType::kFloat32);
  }
};

GRADFUSE_DECLARE_OP(ApplyAdamW8bitArgs)

}  // namespace gradfuse
