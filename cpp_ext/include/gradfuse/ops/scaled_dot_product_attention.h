#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Attention. With s = scale query key^T, of the keys that a row sees, and d what dropout makes of 1:
//   p = softmax(s);  output = (d p) value;  logsumexp = log of the sum of exp(s)
// H is a multiple of G, and query head h reads the keys of head h / (H / G). With causal 1 row l sees keys 0 to l, with
// causal 2 keys 0 to l + S - L. attn_mask is true where a key is seen, or added to s. A row that sees no key has output
// and logsumexp 0. Dropout keeps an element whose 31 random bits, of seed, draw + drawn and the element's place in
// (B, H, L, S), are at least dropout_threshold.
struct ScaledDotProductAttentionArgs {
  static constexpr char kName[] = "ScaledDotProductAttention";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  static constexpr TypeSet kMask = TypeSet(DType::kBool).OrT();

  Tensor query;                     // (B, H, L, E)
  Tensor key;                       // (B, G, S, E)
  Tensor value;                     // (B, G, S, Ev)
  std::optional<Tensor> attn_mask;  // the last 2 to 4 dimensions of (B, H, L, S), each in full or 1
  std::optional<Tensor> seed;       // one element
  std::optional<Tensor> drawn;      // one element
  float scale = 0;                  // 0: 1 / sqrt(E)
  int64_t causal = 0;
  int64_t dropout_threshold = 0;
  int64_t draw = 0;
  MutableTensor output;     // (B, H, L, Ev)
  MutableTensor logsumexp;  // (B, H, L), in the type of the computation

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("query", self.query, kT);
    visitor.Input("key", self.key, kT);
    visitor.Input("value", self.value, kT);
    visitor.Input("attn_mask", self.attn_mask, kMask);
    visitor.Input("seed", self.seed, DType::kInt64);
    visitor.Input("drawn", self.drawn, DType::kInt64);
    visitor.Attribute("scale", self.scale);
    visitor.Attribute("causal", self.causal);
    visitor.Attribute("dropout_threshold", self.dropout_threshold);
    visitor.Attribute("draw", self.draw);
    visitor.Output("output", self.output, kT);
    visitor.Output("logsumexp", self.logsumexp, kComputedT);
  }
};

GRADFUSE_DECLARE_OP(ScaledDotProductAttentionArgs)

}  // namespace gradfuse
