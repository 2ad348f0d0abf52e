#include "gradfuse/ops/matmul_n_bits.h"

#include "kernels/packed_weight_checks.h"

namespace gradfuse {

Status Check(const MatmulNBitsArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckPackedWeight(args));
  GRADFUSE_EXPECT(args.input.shape.rank() >= 1, "input", Describe(args.input), "1 dimension or more");
  GRADFUSE_EXPECT(HasColumns(args, args.InFeatures()), "input", Describe(args.input),
                  "last dimension " + DescribeColumns(args) + ", as weight has columns");
  GRADFUSE_RETURN_IF_ERROR(CheckShape("bias", args.bias, {args.OutFeatures()}, ", as weight has rows"));
  return {};
}

std::vector<Shape> OutputShapes(const MatmulNBitsArgs& args) {
  Shape shape = args.input.shape;
  shape[shape.rank() - 1] = args.OutFeatures();
  return {shape};
}

}  // namespace gradfuse
