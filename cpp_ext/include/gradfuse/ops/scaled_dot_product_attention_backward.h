#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradients of ScaledDotProductAttention. With p = exp(scale query key^T - logsumexp) where a row sees a key, else 0, d
// what dropout makes of 1, and r = sum of grad_output output over a row:
//   grad_value = (d p)^T grad_output;  s = scale p (d grad_output value^T - r)
//   grad_query = s key;  grad_key = s^T query
// and heads of queries that share a head of keys add up there. Masks and dropout are those of
// ScaledDotProductAttention.
struct ScaledDotProductAttentionBackwardArgs {
  static constexpr char kName[] = "ScaledDotProductAttentionBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  static constexpr TypeSet kMask = TypeSet(DType::kBool).OrT();

  Tensor grad_output;               // (B, H, L, Ev)
  Tensor query;                     // (B, H, L, E)
  Tensor key;                       // (B, G, S, E)
  Tensor value;                     // (B, G, S, Ev)
  Tensor output;                    // (B, H, L, Ev)
  Tensor logsumexp;                 // (B, H, L), in the type of the computation
  std::optional<Tensor> attn_mask;  // the last 2 to 4 dimensions of (B, H, L, S), each in full or 1
  std::optional<Tensor> seed;       // one element
  std::optional<Tensor> drawn;      // one element
  float scale = 0;                  // 0: 1 / sqrt(E)
  int64_t causal = 0;
  int64_t dropout_threshold = 0;
  int64_t draw = 0;
  // Of the shapes of query, key and value.
  MutableTensor grad_query;
  MutableTensor grad_key;
  MutableTensor grad_value;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kT);
    visitor.Input("query", self.query, kT);
    visitor.Input("key", self.key, kT);
    visitor.Input("value", self.value, kT);
    visitor.Input("output", self.output, kT);
    visitor.Input("logsumexp", self.logsumexp, kComputedT);
    visitor.Input("attn_mask", self.attn_mask, kMask);
    visitor.Input("seed", self.seed, DType::kInt64);
    visitor.Input("drawn", self.drawn, DType::kInt64);
    visitor.Attribute("scale", self.scale);
    visitor.Attribute("causal", self.causal);
    visitor.Attribute("dropout_threshold", self.dropout_threshold);
    visitor.Attribute("draw", self.draw);
    visitor.Output("grad_query", self.grad_query, kT);
    visitor.Output("grad_key", self.grad_key, kT);
    visitor.Output("grad_value", self.grad_value, kT);
  }
};

GRADFUSE_DECLARE_OP(ScaledDotProductAttentionBackwardArgs)

}  // namespace gradfuse
