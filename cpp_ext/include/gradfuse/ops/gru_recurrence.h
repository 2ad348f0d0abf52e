#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// The recurrence of a GRU over T steps, of N items and H units, whose input is projected already. At step t, with h of
// the step before it:
//   x_r, x_z, x_n = the three parts of input;  h_r, h_z, h_n = those of h weight^T + bias
//   r = sigmoid(x_r + h_r);  z = sigmoid(x_z + h_z);  n = tanh(x_n + r h_n);  h = n + z (h - n)
// With reverse, steps go from the last to the first.
struct GruRecurrenceArgs {
  static constexpr char kName[] = "GruRecurrence";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor input;                // (T, N, 3 H)
  Tensor initial_h;            // (N, H)
  Tensor weight;               // (3 H, H)
  std::optional<Tensor> bias;  // (3 H)
  int64_t reverse = 0;
  MutableTensor hidden;  // (T, N, H)
  MutableTensor gates;   // (T, N, 4 H): r, z, n and h_n

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("input", self.input, kT);
    visitor.Input("initial_h", self.initial_h, kT);
    visitor.Input("weight", self.weight, kT);
    visitor.Input("bias", self.bias, kT);
    visitor.Attribute("reverse", self.reverse);
    visitor.Output("hidden", self.hidden, kT);
    visitor.Output("gates", self.gates, kT);
  }
};

GRADFUSE_DECLARE_OP(GruRecurrenceArgs)

}  // namespace gradfuse
