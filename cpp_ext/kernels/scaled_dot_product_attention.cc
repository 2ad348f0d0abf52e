#include "gradfuse/ops/scaled_dot_product_attention.h"

#include "kernels/attention.h"

namespace gradfuse {

Status Check(const ScaledDotProductAttentionArgs& args) { return CheckAttention(args); }

std::vector<Shape> OutputShapes(const ScaledDotProductAttentionArgs& args) {
  const Shape& query = args.query.shape;
  return {{query[0], query[1], query[2], args.value.shape[3]}, {query[0], query[1], query[2]}};
}

}  // namespace gradfuse
