#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// One update by SGD, as torch.optim's for one tensor without dampening. With g = gradient_scale gradient +
// weight_decay parameter:
//   new_momentum_buffer = momentum momentum_buffer + g
//   new_parameter = parameter - learning_rate d
// where d is new_momentum_buffer, with nesterov g + momentum new_momentum_buffer, and without momentum_buffer g.
struct ApplySgdArgs {
  static constexpr char kName[] = "ApplySgd";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor parameter;
  Tensor gradient;                        // the shape of parameter
  Tensor learning_rate;                   // ()
  std::optional<Tensor> momentum_buffer;  // the shape of parameter
  std::optional<Tensor> gradient_scale;   // ()
  float momentum = 0;
  float weight_decay = 0;
  int64_t nesterov = 0;
  MutableTensor new_parameter;
  MutableTensor new_momentum_buffer;  // (0) without momentum_buffer

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("parameter", self.parameter, kT);
    visitor.Input("gradient", self.gradient, kT);
    visitor.Input("learning_rate", self.learning_rate, DType::kFloat32);
    visitor.Input("momentum_buffer", self.momentum_buffer, kT);
    visitor.Input("gradient_scale", self.gradient_scale, DType::kFloat32);
    visitor.Attribute("momentum", self.momentum);
    visitor.Attribute("weight_decay", self.weight_decay);
    visitor.Attribute("nesterov", self.nesterov);
    visitor.Output("new_parameter", self.new_parameter, kT);
    visitor.Output("new_momentum_buffer", self.new_momentum_buffer, kT);
  }
};

GRADFUSE_DECLARE_OP(ApplySgdArgs)

}  // namespace gradfuse
