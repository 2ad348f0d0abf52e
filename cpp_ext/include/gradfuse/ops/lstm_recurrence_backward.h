#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// The gradients of LstmRecurrence's input and first states. From the last step on, with c' the cell before a step, and
// what comes from the steps behind it in dh and dc:
//   dh = grad_hidden + dh;  dc = grad_cell + dc + dh o (1 - tanh(c)^2)
//   grad_input = dc g i (1 - i), dc c' f (1 - f), dc i (1 - g^2), dh tanh(c) o (1 - o)
//   dh = grad_input weight;  dc = dc f
struct LstmRecurrenceBackwardArgs {
  static constexpr char kName[] = "LstmRecurrenceBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor grad_hidden;               // (T, N, H)
  std::optional<Tensor> grad_cell;  // (T, N, H)
  Tensor initial_c;                 // (N, H)
  Tensor cell;                      // (T, N, H)
  Tensor gates;                     // (T, N, 4 H)
  Tensor weight;                    // (4 H, H)
  int64_t reverse = 0;
  MutableTensor grad_input;      // (T, N, 4 H)
  MutableTensor grad_initial_h;  // (N, H)
  MutableTensor grad_initial_c;  // (N, H)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_hidden", self.grad_hidden, kT);
    visitor.Input("grad_cell", self.grad_cell, kT);
    visitor.Input("initial_c", self.initial_c, kT);
    visitor.Input("cell", self.cell, kT);
    visitor.Input("gates", self.gates, kT);
    visitor.Input("weight", self.weight, kT);
    visitor.Attribute("reverse", self.reverse);
    visitor.Output("grad_input", self.grad_input, kT);
    visitor.Output("grad_initial_h", self.grad_initial_h, kT);
    visitor.Output("grad_initial_c", self.grad_initial_c, kT);
  }
};

GRADFUSE_DECLARE_OP(LstmRecurrenceBackwardArgs)

}  // namespace gradfuse
