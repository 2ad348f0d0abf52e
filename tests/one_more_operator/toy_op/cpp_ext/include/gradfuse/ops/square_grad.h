#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradient of the squares of all elements with respect to them: grad_x = factor x grad.
struct SquareGradArgs {
  static constexpr char kName[] = "SquareGrad";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor grad;
  Tensor x;
  float factor = 2;
  MutableTensor grad_x;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad", self.grad, kT);
    visitor.Input("x", self.x, kT);
    visitor.Attribute("factor", self.factor);
    visitor.Output("grad_x", self.grad_x, kT);
  }
};

GRADFUSE_DECLARE_OP(SquareGradArgs)

}  // namespace gradfuse
