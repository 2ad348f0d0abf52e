#pragma once

#include "gradfuse/op.h"
#include "gradfuse/packed_weight.h"

namespace gradfuse {

// Gradient of a product with a weight of few bits with respect to what it multiplies: grad_output times the weight.
struct MatmulNBitsBackwardArgs : PackedWeight {
  static constexpr char kName[] = "MatmulNBitsBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor grad_output;  // (*, out)
  int64_t in_features = 0;
  MutableTensor grad_input;  // (*, in_features)

  int64_t Rows() const {
    return Shape(grad_output.shape.dims(), static_cast<size_t>(grad_output.shape.rank() - 1)).NumElements();
  }

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kT);
    visitor.Input("weight", self.weight, DType::kUInt8);
    visitor.Input("scales", self.scales, kT);
    visitor.Input("zero_points", self.zero_points, DType::kUInt8);
    visitor.Attribute("in_features", self.in_features);
    visitor.Attribute("bits", self.bits);
    visitor.Output("grad_input", self.grad_input, kT);
  }
};

GRADFUSE_DECLARE_OP(MatmulNBitsBackwardArgs)

}  // namespace gradfuse
