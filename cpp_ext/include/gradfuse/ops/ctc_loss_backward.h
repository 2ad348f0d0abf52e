#pragma once

#include "gradfuse/op.h"
#include "gradfuse/ops/ctc_loss.h"

namespace gradfuse {

// Gradient of the CTC loss with respect to the logits behind log_probs, as aten::_ctc_loss_backward:
//   grad_input[t,b,c] = (exp(log_probs[t,b,c]) - P(class c at step t | item b's labels)) grad_out[b]
// for t < input_lengths[b], and 0 after.
//
// An item whose neg_log_likelihood is not finite gives NaN for t < input_lengths[b], or 0 where it is +inf and
// zero_infinity is set. Of log_alpha only steps below the item's input length and states up to twice its target
// length are read. A class of probability 0 gets 0, where aten gives NaN.
struct CtcLossBackwardArgs {
  static constexpr char kName[] = "CtcLossBackward";
  static constexpr TypeSet kTypes = kCtcTypes;

  Tensor grad_out;            // (N,)
  Tensor log_probs;           // (T, N, C)
  Tensor targets;             // (N, S), or all items' targets joined: (sum of target_lengths,)
  Tensor input_lengths;       // (N,)
  Tensor target_lengths;      // (N,)
  Tensor neg_log_likelihood;  // (N,)
  Tensor log_alpha;           // (N, T, X), X >= 2 max(target_lengths) + 1
  int64_t blank = 0;
  int64_t zero_infinity = 0;
  MutableTensor grad_input;  // (T, N, C)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_out", self.grad_out, kT);
    visitor.Input("log_probs", self.log_probs, kT);
    visitor.Input("targets", self.targets, kCtcTargetTypes.Checked());
    visitor.Input("input_lengths", self.input_lengths, TypeSet(DType::kInt64).Checked());
    visitor.Input("target_lengths", self.target_lengths, TypeSet(DType::kInt64).Checked());
    visitor.Input("neg_log_likelihood", self.neg_log_likelihood, kT);
    visitor.Input("log_alpha", self.log_alpha, kT);
    visitor.Attribute("blank", self.blank);
    visitor.Attribute("zero_infinity", self.zero_infinity);
    visitor.Output("grad_input", self.grad_input, kT);
  }
};

GRADFUSE_DECLARE_OP(CtcLossBackwardArgs)

}  // namespace gradfuse
