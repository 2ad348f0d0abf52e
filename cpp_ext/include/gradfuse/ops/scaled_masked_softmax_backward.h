#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradient of y = softmax(scale x, masked) with respect to x:
//   r = sum over the last dimension of grad_output y;  grad_input = scale y (grad_output - r), and +0 where mask is
//   true.
struct ScaledMaskedSoftmaxBackwardArgs {
  static constexpr char kName[] = "ScaledMaskedSoftmaxBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  static constexpr int kOverwrittenInput = 0;  // grad_output

  Tensor grad_output;          // (B, H, S1, S2)
  Tensor y;                    // (B, H, S1, S2)
  std::optional<Tensor> mask;  // (B or 1, H or 1, S1, S2)
  float scale = 1;
  int64_t fix_triu_mask = 0;
  MutableTensor grad_input;  // (B, H, S1, S2)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kT);
    visitor.Input("y", self.y, kT);
    visitor.Input("mask", self.mask, DType::kBool);
    visitor.Attribute("scale", self.scale);
    visitor.Attribute("fix_triu_mask", self.fix_triu_mask);
    visitor.Output("grad_input", self.grad_input, kT);
  }
};

GRADFUSE_DECLARE_OP(ScaledMaskedSoftmaxBackwardArgs)

}  // namespace gradfuse
