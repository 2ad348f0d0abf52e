#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Matrix product a b + bias, whose factors may lie transposed, and may be rounded to bfloat16; the axes before the last
// two are broadcast.
struct FusedMatmulArgs {
  static constexpr char kName[] = "FusedMatmul";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  static constexpr TypeSet kFactor{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor a;                    // (*, M, K), or (*, K, M)
  Tensor b;                    // (*, K, N), or (*, N, K)
  std::optional<Tensor> bias;  // (N)
  int64_t trans_a = 0;
  int64_t trans_b = 0;
  int64_t factors_in_bfloat16 = 0;
  MutableTensor output;  // (*, M, N)

  int64_t Rows() const { return a.shape[a.shape.rank() - (trans_a != 0 ? 1 : 2)]; }
  int64_t Depth() const { return a.shape[a.shape.rank() - (trans_a != 0 ? 2 : 1)]; }
  int64_t Columns() const { return b.shape[b.shape.rank() - (trans_b != 0 ? 2 : 1)]; }

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("a", self.a, kT);
    visitor.Input("b", self.b, kFactor);
    visitor.Input("bias", self.bias, kT);
    visitor.Attribute("trans_a", self.trans_a);
    visitor.Attribute("trans_b", self.trans_b);
    visitor.Attribute("factors_in_bfloat16", self.factors_in_bfloat16);
    visitor.Output("output", self.output, kT);
  }
};

GRADFUSE_DECLARE_OP(FusedMatmulArgs)

}  // namespace gradfuse
