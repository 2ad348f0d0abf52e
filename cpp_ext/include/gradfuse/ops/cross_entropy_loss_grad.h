#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradient of the cross entropy loss with respect to the logits behind log_prob.
//
// With p = exp(log_prob), y = target, w = weight or ones, g = grad_loss, ls = label_smoothing:
//   grad_input[i,c] = p[i,c] q_i - [c = y_i] q_i + p[i,c] s_i sum(w) - s_i w[c]
//   q_i = g_i (1 - ls) w[y_i],  s_i = g_i ls / C;  both over sum_i w[y_i] for "mean"
// Rows with y_i = ignore_index are +0. Gradients below the smallest normal float may be 0.
struct CrossEntropyLossGradArgs {
  static constexpr char kName[] = "CrossEntropyLossGrad";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  static constexpr int kOverwrittenInput = 1;  // log_prob

  Tensor grad_loss;              // () or (1,); (N,) for "none"
  Tensor log_prob;               // (N, C)
  Tensor target;                 // (N,)
  std::optional<Tensor> weight;  // (C,)
  std::optional<Tensor> grad_zloss;
  std::optional<Tensor> lse_for_zloss;
  std::string reduction = "mean";
  int64_t ignore_index = -100;
  float label_smoothing = 0;
  float lse_square_scale_for_zloss = 0;
  MutableTensor grad_input;  // (N, C)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_loss", self.grad_loss, kT);
    visitor.Input("log_prob", self.log_prob, kT);
    visitor.Input("target", self.target, TypeSet(DType::kInt64).Checked());
    visitor.Input("weight", self.weight, DType::kFloat32);
    visitor.Input("grad_zloss", self.grad_zloss, kT);
    visitor.Input("lse_for_zloss", self.lse_for_zloss, kT);
    visitor.Attribute("reduction", self.reduction);
    visitor.Attribute("ignore_index", self.ignore_index);
    visitor.Attribute("label_smoothing", self.label_smoothing);
    visitor.Attribute("lse_square_scale_for_zloss", self.lse_square_scale_for_zloss);
    visitor.Output("grad_input", self.grad_input, kT);
  }
};

GRADFUSE_DECLARE_OP(CrossEntropyLossGradArgs)

}  // namespace gradfuse
