#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

inline constexpr TypeSet kCtcTypes{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
inline constexpr TypeSet kCtcTargetTypes{DType::kInt64, DType::kInt32, DType::kBool, DType::kFloat32, DType::kFloat16};

// Connectionist temporal classification (Graves et al., 2006), the forward pass: the loss of each item and the log
// probabilities log_alpha[b,t,s] of all label prefixes, as CtcLossBackward needs them.
//
// Over l' = blank, l1, blank, l2, ..., blank, and with lse for log-sum-exp:
//   alpha[0,0] = lp[0,blank];  alpha[0,1] = lp[0,l1];  else -inf
//   alpha[t,s] = lse(alpha[t-1,s], alpha[t-1,s-1], alpha[t-1,s-2] if l'[s] != l'[s-2]) + lp[t,l'[s]]
//   neg_log_likelihood = -lse(alpha[Tb-1,2L], alpha[Tb-1,2L-1])
// log_alpha is -inf wherever no prefix has probability, past an item's lengths too. zero_infinity is for the backward
// pass, as in aten::_ctc_loss: an infeasible item's loss is +inf here whatever it says.
struct CtcLossArgs {
  static constexpr char kName[] = "CtcLoss";
  static constexpr TypeSet kTypes = kCtcTypes;

  Tensor log_probs;       // (T, N, C)
  Tensor targets;         // (N, S), or all items' targets joined: (sum of target_lengths,)
  Tensor input_lengths;   // (N,)
  Tensor target_lengths;  // (N,)
  int64_t blank = 0;
  int64_t zero_infinity = 0;
  MutableTensor neg_log_likelihood;  // (N,)
  MutableTensor log_alpha;           // (N, T, 2 max(target_lengths) + 1)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("log_probs", self.log_probs, kT);
    visitor.Input("targets", self.targets, kCtcTargetTypes.Checked());
    visitor.Input("input_lengths", self.input_lengths, TypeSet(DType::kInt64).Checked());
    visitor.Input("target_lengths", self.target_lengths, TypeSet(DType::kInt64).ReadByHost().Checked());
    visitor.Attribute("blank", self.blank);
    visitor.Attribute("zero_infinity", self.zero_infinity);
    visitor.Output("neg_log_likelihood", self.neg_log_likelihood, kT);
    visitor.Output("log_alpha", self.log_alpha, kT);
  }
};

GRADFUSE_DECLARE_OP(CtcLossArgs)

}  // namespace gradfuse
