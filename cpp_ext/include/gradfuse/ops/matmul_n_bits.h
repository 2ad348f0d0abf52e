#pragma once

#include "gradfuse/op.h"
#include "gradfuse/packed_weight.h"

namespace gradfuse {

// Product with a weight of few bits: input times the transposed weight, plus bias.
struct MatmulNBitsArgs : PackedWeight {
  static constexpr char kName[] = "MatmulNBits";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor input;                // (*, in_features)
  std::optional<Tensor> bias;  // (out)
  MutableTensor output;        // (*, out)

  int64_t InFeatures() const { return input.shape[input.shape.rank() - 1]; }
  int64_t Rows() const { return Shape(input.shape.dims(), static_cast<size_t>(input.shape.rank() - 1)).NumElements(); }

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("input", self.input, kT);
    visitor.Input("weight", self.weight, DType::kUInt8);
    visitor.Input("scales", self.scales, kT);
    visitor.Input("zero_points", self.zero_points, DType::kUInt8);
    visitor.Input("bias", self.bias, kT);
    visitor.Attribute("bits", self.bits);
    visitor.Output("output", self.output, kT);
  }
};

GRADFUSE_DECLARE_OP(MatmulNBitsArgs)

}  // namespace gradfuse
