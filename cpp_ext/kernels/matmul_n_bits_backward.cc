#include "gradfuse/ops/matmul_n_bits_backward.h"

#include "kernels/packed_weight_checks.h"

namespace gradfuse {

Status Check(const MatmulNBitsBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckPackedWeight(args));
  const Shape& grad = args.grad_output.shape;
  GRADFUSE_EXPECT(grad.rank() >= 1, "grad_output", Describe(args.grad_output), "1 dimension or more");
  GRADFUSE_EXPECT(grad[grad.rank() - 1] == args.OutFeatures(), "grad_output", Describe(args.grad_output),
                  "last dimension " + std::to_string(args.OutFeatures()) + ", as weight has rows");
  GRADFUSE_EXPECT(HasColumns(args, args.in_features), "in_features", std::to_string(args.in_features),
                  DescribeColumns(args));
  return {};
}

std::vector<Shape> OutputShapes(const MatmulNBitsBackwardArgs& args) {
  Shape shape = args.grad_output.shape;
  shape[shape.rank() - 1] = args.in_features;
  return {shape};
}

}  // namespace gradfuse
