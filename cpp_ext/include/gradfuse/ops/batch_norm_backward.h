#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradients of batch normalization in training mode. With g = grad_output, or 0 where relu_output is at most 0, sums
// over all but the channels, n elements a channel, and d = input - save_mean:
//   grad_bias = sum of g;  grad_weight = save_invstd (sum of g d)
//   grad_input = weight save_invstd (g - grad_bias / n - d save_invstd grad_weight / n)
struct BatchNormBackwardArgs {
  static constexpr char kName[] = "BatchNormBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  static constexpr int kOverwrittenInput = 0;  // grad_output
  using Numbers = std::vector<int64_t>;

  Tensor grad_output;                 // (N, C, ...)
  Tensor input;                       // (N, C, ...)
  std::optional<Tensor> weight;       // (C)
  Tensor save_mean;                   // (C)
  Tensor save_invstd;                 // (C)
  std::optional<Tensor> relu_output;  // (N, C, ...)
  Numbers output_mask{1, 1, 1};
  // Of the shapes of input, (C) and (C); (0) where output_mask is 0.
  MutableTensor grad_input;
  MutableTensor grad_weight;
  MutableTensor grad_bias;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kA);
    visitor.Input("input", self.input, kA);
    visitor.Input("weight", self.weight, kT);
    visitor.Input("save_mean", self.save_mean, kT);
    visitor.Input("save_invstd", self.save_invstd, kT);
    visitor.Input("relu_output", self.relu_output, kA);
    visitor.Attribute("output_mask", self.output_mask);
    visitor.Output("grad_input", self.grad_input, kA);
    visitor.Output("grad_weight", self.grad_weight, kT);
    visitor.Output("grad_bias", self.grad_bias, kT);
  }
};

GRADFUSE_DECLARE_OP(BatchNormBackwardArgs)

}  // namespace gradfuse
