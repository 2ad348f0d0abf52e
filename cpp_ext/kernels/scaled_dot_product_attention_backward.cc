#include "gradfuse/ops/scaled_dot_product_attention_backward.h"

#include "kernels/attention.h"
#include "kernels/checks.h"

namespace gradfuse {

Status Check(const ScaledDotProductAttentionBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckAttention(args));
  const Shape& query = args.query.shape;
  const Shape output{query[0], query[1], query[2], args.value.shape[3]};
  const Shape rows{query[0], query[1], query[2]};
  const char* const why = ", B, H and L of query and Ev of value";
  GRADFUSE_RETURN_IF_ERROR(CheckShape("grad_output", args.grad_output, output, why));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("output", args.output, output, why));
  return CheckShape("logsumexp", args.logsumexp, rows, ", B, H and L of query");
}

std::vector<Shape> OutputShapes(const ScaledDotProductAttentionBackwardArgs& args) {
  return {args.query.shape, args.key.shape, args.value.shape};
}

}  // namespace gradfuse
