#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// The recurrence of an LSTM over T steps, of N items and H units, whose input is projected already. At step t, with
// h and c of the step before it:
//   i, f, g, o = the four parts of input + h weight^T + bias;  i, f, o = sigmoid of each;  g = tanh(g)
//   c = f c + i g;  h = o tanh(c)
// With reverse, steps go from the last to the first.
struct LstmRecurrenceArgs {
  static constexpr char kName[] = "LstmRecurrence";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor input;                // (T, N, 4 H)
  Tensor initial_h;            // (N, H)
  Tensor initial_c;            // (N, H)
  Tensor weight;               // (4 H, H)
  std::optional<Tensor> bias;  // (4 H)
  int64_t reverse = 0;
  MutableTensor hidden;  // (T, N, H)
  MutableTensor cell;    // (T, N, H)
  MutableTensor gates;   // (T, N, 4 H)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("input", self.input, kT);
    visitor.Input("initial_h", self.initial_h, kT);
    visitor.Input("initial_c", self.initial_c, kT);
    visitor.Input("weight", self.weight, kT);
    visitor.Input("bias", self.bias, kT);
    visitor.Attribute("reverse", self.reverse);
    visitor.Output("hidden", self.hidden, kT);
    visitor.Output("cell", self.cell, kT);
    visitor.Output("gates", self.gates, kT);
  }
};

GRADFUSE_DECLARE_OP(LstmRecurrenceArgs)

}  // namespace gradfuse
