#include "gradfuse/ops/fused_matmul.h"

#include "kernels/batch_of_matrices.h"
#include "kernels/checks.h"

namespace gradfuse {

Status Check(const FusedMatmulArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckFlag("trans_a", args.trans_a));
  GRADFUSE_RETURN_IF_ERROR(CheckFlag("trans_b", args.trans_b));
  GRADFUSE_RETURN_IF_ERROR(CheckFlag("factors_in_bfloat16", args.factors_in_bfloat16));
  GRADFUSE_EXPECT(args.a.shape.rank() >= 2, "a", Describe(args.a), "2 dimensions or more");
  GRADFUSE_EXPECT(args.b.shape.rank() >= 2, "b", Describe(args.b), "2 dimensions or more");
  const int64_t depth = args.b.shape[args.b.shape.rank() - (args.trans_b != 0 ? 1 : 2)];
  GRADFUSE_EXPECT(depth == args.Depth(), "b", Describe(args.b),
                  std::to_string(args.Depth()) + " rows, as a has columns");
  GRADFUSE_EXPECT(AreBroadcast(args.a.shape, args.b.shape), "b", Describe(args.b),
                  "dimensions before the matrices as in a, " + Describe(args.a) + ", or 1");
  GRADFUSE_RETURN_IF_ERROR(CheckShape("bias", args.bias, {args.Columns()}, ", as the product has columns"));
  return {};
}

std::vector<Shape> OutputShapes(const FusedMatmulArgs& args) {
  return {BroadcastShape(args.a.shape, args.b.shape, args.Rows(), args.Columns())};
}

}  // namespace gradfuse
