#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradient of the mean squared error with respect to self:
//   grad_input = 2 (self - target) grad_output, and for "mean" over self's own number of elements.
// The three operands broadcast together, and grad_input has their common shape.
struct MseLossBackwardArgs {
  enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

  static constexpr char kName[] = "MseLossBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor grad_output;
  Tensor self;
  Tensor target;
  int64_t reduction = kMean;
  MutableTensor grad_input;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kT);
    visitor.Input("self", self.self, kT);
    visitor.Input("target", self.target, kT);
    visitor.Attribute("reduction", self.reduction);
    visitor.Output("grad_input", self.grad_input, kT);
  }
};

GRADFUSE_DECLARE_OP(MseLossBackwardArgs)

}  // namespace gradfuse
