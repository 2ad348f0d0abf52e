#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// The gradients of GruRecurrence's input, first state and recurrent part, h weight^T + bias. From the last step on,
// with h' the state before a step, and what comes from the steps behind it in dh:
//   dh = grad_hidden + dh;  dn = dh (1 - z) (1 - n^2)
//   grad_input = dn h_n r (1 - r), dh (h' - n) z (1 - z), dn
//   grad_recurrent = the same, but for dn r in the place of dn
//   dh = dh z + grad_recurrent weight
struct GruRecurrenceBackwardArgs {
  static constexpr char kName[] = "GruRecurrenceBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor grad_hidden;  // (T, N, H)
  Tensor initial_h;    // (N, H)
  Tensor hidden;       // (T, N, H)
  Tensor gates;        // (T, N, 4 H)
  Tensor weight;       // (3 H, H)
  int64_t reverse = 0;
  MutableTensor grad_input;      // (T, N, 3 H)
  MutableTensor grad_initial_h;  // (N, H)
  MutableTensor grad_recurrent;  // (T, N, 3 H)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_hidden", self.grad_hidden, kT);
    visitor.Input("initial_h", self.initial_h, kT);
    visitor.Input("hidden", self.hidden, kT);
    visitor.Input("gates", self.gates, kT);
    visitor.Input("weight", self.weight, kT);
    visitor.Attribute("reverse", self.reverse);
    visitor.Output("grad_input", self.grad_input, kT);
    visitor.Output("grad_initial_h", self.grad_initial_h, kT);
    visitor.Output("grad_recurrent", self.grad_recurrent, kT);
  }
};

GRADFUSE_DECLARE_OP(GruRecurrenceBackwardArgs)

}  // namespace gradfuse
