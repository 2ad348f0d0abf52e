#include "gradfuse/ops/scaled_dot_product_attention_backward.h"

#include "kernels/attention.h"

namespace gradfuse {

Status Check(const ScaledDotProductAttentionBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckAttention(args));
  const Shape& query = args.query.shape;
  const Shape output{query[0], query[1], query[2], args.value.shape[3]};
  const Shape rows{query[0], query[1], query[2]};
  GRADFUSE_EXPECT(args.grad_output.shape == output, "grad_output", Describe(args.grad_output),
                  Describe(args.grad_output.dtype, output) + ", B, H and L of query and Ev of value");
  GRADFUSE_EXPECT(args.output.shape == output, "output", Describe(args.output),
                  Describe(args.output.dtype, output) + ", B, H and L of query and Ev of value");
  GRADFUSE_EXPECT(args.logsumexp.shape == rows, "logsumexp", Describe(args.logsumexp),
                  Describe(args.logsumexp.dtype, rows) + ", B, H and L of query");
  return {};
}

std::vector<Shape> OutputShapes(const ScaledDotProductAttentionBackwardArgs& args) {
  return {args.query.shape, args.key.shape, args.value.shape};
}

}  // namespace gradfuse
