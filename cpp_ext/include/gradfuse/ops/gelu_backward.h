#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradient of the Gaussian error linear unit with respect to self:
//   grad_input = grad_output (P(self) + self p(self)), with the normal distribution P and its density p.
// "tanh": of 0.5 self (1 + tanh(sqrt(2 / pi) (self + 0.044715 self^3))).
struct GeluBackwardArgs {
  static constexpr char kName[] = "GeluBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor grad_output;
  Tensor self;
  std::string approximate = "none";
  MutableTensor grad_input;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kT);
    visitor.Input("self", self.self, kT);
    visitor.Attribute("approximate", self.approximate);
    visitor.Output("grad_input", self.grad_input, kT);
  }

  bool ByTanh() const { return approximate == "tanh"; }
};

GRADFUSE_DECLARE_OP(GeluBackwardArgs)

}  // namespace gradfuse
