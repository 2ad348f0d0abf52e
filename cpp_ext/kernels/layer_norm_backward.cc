#include "gradfuse/ops/layer_norm_backward.h"

#include <string>

#include "kernels/checks.h"
#include "kernels/layer_norm.h"

namespace gradfuse {
namespace {

// A number for each row, in the type of the computation.
Status CheckStatistic(const char* name, const Tensor& tensor, const Tensor& input, int first) {
  const DType computed = input.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  GRADFUSE_EXPECT(tensor.dtype == computed, name, Name(tensor.dtype),
                  std::string(Name(computed)) + ", as input is " + Name(input.dtype));
  // onnxruntime keeps the shape of a tensor without elements when it takes the mean of its rows.
  if (input.shape.NumElements() == 0 && tensor.shape == input.shape) return {};
  Shape shape = input.shape;
  for (int i = first; i < shape.rank(); ++i) shape[i] = 1;
  return CheckShape(name, tensor, shape, ", one a row of input");
}

}  // namespace

Status Check(const LayerNormBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  const int64_t rank = args.input.shape.rank();
  GRADFUSE_EXPECT(rank >= 1, "input", Describe(args.input), "1 dimension or more");
  GRADFUSE_EXPECT(args.axis >= -rank && args.axis < rank, "axis", std::to_string(args.axis),
                  std::to_string(-rank) + " to " + std::to_string(rank - 1));
  GRADFUSE_RETURN_IF_ERROR(CheckMask(args.output_mask, 3));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("grad_output", args.grad_output, args.input.shape, " as input"));
  const NormalizedRows rows(args.input.shape, args.axis);
  GRADFUSE_RETURN_IF_ERROR(CheckShape("weight", args.weight, rows.inner, " as the normalized axes of input"));
  if (args.mean) GRADFUSE_RETURN_IF_ERROR(CheckStatistic("mean", *args.mean, args.input, rows.first));
  return CheckStatistic("rstd", args.rstd, args.input, rows.first);
}

std::vector<Shape> OutputShapes(const LayerNormBackwardArgs& args) {
  const NormalizedRows rows(args.input.shape, args.axis);
  return Masked(args.output_mask, {args.input.shape, rows.inner, rows.inner});
}

}  // namespace gradfuse
