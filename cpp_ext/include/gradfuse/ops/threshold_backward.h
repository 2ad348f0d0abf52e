#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradient of a ReLU, or of a threshold: 0 where self, its input or result, is at most the threshold, else grad_output.
struct ThresholdBackwardArgs {
  static constexpr char kName[] = "ThresholdBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

  Tensor grad_output;
  Tensor self;
  float threshold = 0;
  MutableTensor grad_input;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kT);
    visitor.Input("self", self.self, kT);
    visitor.Attribute("threshold", self.threshold);
    visitor.Output("grad_input", self.grad_input, kT);
  }
};

GRADFUSE_DECLARE_OP(ThresholdBackwardArgs)

}  // namespace gradfuse
