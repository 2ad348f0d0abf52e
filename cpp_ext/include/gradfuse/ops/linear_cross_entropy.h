#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// The cross entropy loss of a linear layer's results, and its gradients, without a tensor of rows by classes.
//
// With z = input linear_weight^T + linear_bias, logits x = z or softcap tanh(z / softcap), p = softmax(x), y = target,
// w = weight or ones, g = grad_loss or ones, ls = label_smoothing:
//   loss_i = -(1 - ls) w[y_i] log p[i,y_i] - ls / C sum_c w[c] log p[i,c], their sum, or it over sum_i w[y_i] for
//   "mean" logsumexp_i = log(sum_c exp(x[i,c])), h_i = grad_logsumexp or zeros the gradient of x[i,c] is p[i,c] (q_i +
//   s_i sum(w) + h_i) - [c = y_i] q_i - s_i w[c] q_i = g_i (1 - ls) w[y_i], s_i = g_i ls / C;  both over sum_i w[y_i]
//   for "mean"
// Rows with y_i = ignore_index have q_i = s_i = 0, and their losses are +0. Where no logsumexp is wanted and its
// gradient is not given, they have no part in anything, whatever they hold.
struct LinearCrossEntropyArgs {
  static constexpr char kName[] = "LinearCrossEntropy";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  static constexpr TypeSet kWeight{DType::kFloat32, DType::kFloat64};
  using Numbers = std::vector<int64_t>;

  Tensor input;                          // (N, H)
  Tensor linear_weight;                  // (C, H)
  Tensor target;                         // (N,)
  std::optional<Tensor> linear_bias;     // (C,)
  std::optional<Tensor> weight;          // (C,), in the type of the computation
  std::optional<Tensor> grad_loss;       // () or (1,); (N,) for "none"
  std::optional<Tensor> grad_logsumexp;  // (N,)
  std::string reduction = "mean";
  int64_t ignore_index = -100;
  float label_smoothing = 0;
  float softcap = 0;  // 0: none
  Numbers output_mask{1, 1, 1, 1, 0};
  // (), (N,) for "none"; three of the shapes of input, linear_weight and linear_bias; (N,). (0) where output_mask is 0.
  MutableTensor loss;
  MutableTensor grad_input;
  MutableTensor grad_weight;
  MutableTensor grad_bias;
  MutableTensor logsumexp;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("input", self.input, kT);
    visitor.Input("linear_weight", self.linear_weight, kT);
    visitor.Input("target", self.target, TypeSet(DType::kInt64).Checked());
    visitor.Input("linear_bias", self.linear_bias, kT);
    visitor.Input("weight", self.weight, kWeight);
    visitor.Input("grad_loss", self.grad_loss, kT);
    visitor.Input("grad_logsumexp", self.grad_logsumexp, kT);
    visitor.Attribute("reduction", self.reduction);
    visitor.Attribute("ignore_index", self.ignore_index);
    visitor.Attribute("label_smoothing", self.label_smoothing);
    visitor.Attribute("softcap", self.softcap);
    visitor.Attribute("output_mask", self.output_mask);
    visitor.Output("loss", self.loss, kT);
    visitor.Output("grad_input", self.grad_input, kT);
    visitor.Output("grad_weight", self.grad_weight, kT);
    visitor.Output("grad_bias", self.grad_bias, kT);
    visitor.Output("logsumexp", self.logsumexp, kT);
  }

  bool Wants(size_t output) const { return output_mask[output] != 0; }
  // Whether rows that are ignored by the loss are computed.
  bool TakesAllRows() const { return Wants(4) || grad_logsumexp.has_value(); }
  int64_t Rows() const { return input.shape[0]; }
  int64_t Features() const { return input.shape[1]; }
  int64_t Classes() const { return linear_weight.shape[0]; }
};

GRADFUSE_DECLARE_OP(LinearCrossEntropyArgs)

}  // namespace gradfuse
