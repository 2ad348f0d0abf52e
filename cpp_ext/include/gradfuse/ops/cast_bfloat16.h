#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Numbers of one of float32 and bfloat16 in the other type, rounded to the nearest, ties to even.
struct CastBfloat16Args {
  static constexpr char kName[] = "CastBfloat16";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kBFloat16};

  static constexpr int64_t kToFloat32 = 1;  // as ONNX numbers types
  static constexpr int64_t kToBFloat16 = 16;

  Tensor self;
  int64_t to = kToBFloat16;
  MutableTensor output;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("self", self.self, kT);
    visitor.Attribute("to", self.to);
    visitor.Output("output", self.output, kOtherThanT);
  }

  // What `to` is for this self.
  int64_t Wanted() const { return self.dtype == DType::kBFloat16 ? kToFloat32 : kToBFloat16; }
};

GRADFUSE_DECLARE_OP(CastBfloat16Args)

}  // namespace gradfuse
