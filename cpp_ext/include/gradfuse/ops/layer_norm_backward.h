#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradients of layer normalization, and without mean those of RMS normalization. With y = (input - mean) rstd,
// g = weight grad_output, and means over the axes from `axis` on:
//   grad_input = rstd (g - mean of g - y (mean of g y)), without mean rstd (g - y (mean of g y))
//   grad_weight = sum of grad_output y;  grad_bias = sum of grad_output, over the other axes
struct LayerNormBackwardArgs {
  static constexpr char kName[] = "LayerNormBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  static constexpr TypeSet kStatistics{DType::kFloat32, DType::kFloat64};
  static constexpr int kOverwrittenInput = 0;  // grad_output
  using Numbers = std::vector<int64_t>;

  Tensor grad_output;  // the shape of input
  Tensor input;
  std::optional<Tensor> weight;  // the shape of the axes from `axis` on
  std::optional<Tensor> mean;    // the shape of input, with 1 from `axis` on; in the type of the computation
  Tensor rstd;                   // as mean
  int64_t axis = -1;
  Numbers output_mask{1, 1, 1};
  // Of the shapes of input, weight and weight; (0) where output_mask is 0.
  MutableTensor grad_input;
  MutableTensor grad_weight;
  MutableTensor grad_bias;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kT);
    visitor.Input("input", self.input, kT);
    visitor.Input("weight", self.weight, kT);
    visitor.Input("mean", self.mean, kStatistics);
    visitor.Input("rstd", self.rstd, kStatistics);
    visitor.Attribute("axis", self.axis);
    visitor.Attribute("output_mask", self.output_mask);
    visitor.Output("grad_input", self.grad_input, kT);
    visitor.Output("grad_weight", self.grad_weight, kT);
    visitor.Output("grad_bias", self.grad_bias, kT);
  }
};

GRADFUSE_DECLARE_OP(LayerNormBackwardArgs)

}  // namespace gradfuse
