#include "gradfuse/ops/matmul_n_bits_backward.h"

namespace gradfuse {

Status Check(const MatmulNBitsBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_EXPECT(args.bits == 2 || args.bits == 4 || args.bits == 8, "bits", std::to_string(args.bits), "2, 4 or 8");
  GRADFUSE_EXPECT(args.in_features >= 1, "in_features", std::to_string(args.in_features), "1 or more");
  const Shape& grad = args.grad_output.shape;
  const Shape& weight = args.weight.shape;
  GRADFUSE_EXPECT(grad.rank() >= 1, "grad_output", Describe(args.grad_output), "1 dimension or more");
  GRADFUSE_EXPECT(weight.rank() == 3, "weight", Describe(args.weight), "rows, blocks and the bytes of a block");
  GRADFUSE_EXPECT(grad[grad.rank() - 1] == weight[0], "grad_output", Describe(args.grad_output),
                  "last dimension " + std::to_string(weight[0]) + ", as weight has rows");
  const int64_t size = args.BlockSize();
  GRADFUSE_EXPECT(size >= 16 && (size & (size - 1)) == 0, "weight", Describe(args.weight),
                  "blocks of a power of two of columns, from 16 on");
  const int64_t fewest = (args.Blocks() - 1) * size + 1;
  const int64_t most = args.Blocks() * size;
  GRADFUSE_EXPECT(args.in_features >= fewest && args.in_features <= most, "in_features",
                  std::to_string(args.in_features), std::to_string(fewest) + " to " + std::to_string(most));
  const int64_t scales = weight[0] * args.Blocks();
  GRADFUSE_EXPECT(args.scales.NumElements() == scales, "scales", Describe(args.scales),
                  std::to_string(scales) + " elements, one a block of weight");
  if (args.zero_points) {
    const int64_t bytes = weight[0] * args.ZeroPointBytes();
    GRADFUSE_EXPECT(args.zero_points->NumElements() == bytes, "zero_points", Describe(*args.zero_points),
                    std::to_string(bytes) + " bytes, a number for each block of weight");
  }
  return {};
}

std::vector<Shape> OutputShapes(const MatmulNBitsBackwardArgs& args) {
  Shape shape = args.grad_output.shape;
  shape[shape.rank() - 1] = args.in_features;
  return {shape};
}

}  // namespace gradfuse
