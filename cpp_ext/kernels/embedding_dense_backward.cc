#include "gradfuse/ops/embedding_dense_backward.h"

#include <limits>

#include "kernels/checks.h"

namespace gradfuse {
namespace {

template <class Index>
Status CheckIndices(const EmbeddingDenseBackwardArgs& args) {
  const Index* indices = args.indices.Data<Index>();
  const int64_t count = args.indices.NumElements();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = indices[i];
    const bool fits = index >= 0 && index < args.num_weights;
    GRADFUSE_EXPECT(
        fits || index == args.padding_idx, "indices[" + std::to_string(i) + "]", std::to_string(index),
        "a row in [0, " + std::to_string(args.num_weights) + ") or padding_idx " + std::to_string(args.padding_idx));
  }
  return {};
}

}  // namespace

Status Check(const EmbeddingDenseBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  constexpr int64_t kMostWeights = std::numeric_limits<int32_t>::max();
  GRADFUSE_EXPECT(args.num_weights >= 0 && args.num_weights <= kMostWeights, "num_weights",
                  std::to_string(args.num_weights), "0 to " + std::to_string(kMostWeights));
  GRADFUSE_RETURN_IF_ERROR(CheckFlag("scale_grad_by_freq", args.scale_grad_by_freq));
  const Shape& grad = args.grad_output.shape;
  GRADFUSE_EXPECT(grad.rank() >= 1, "grad_output", Describe(args.grad_output), "1 dimension or more");
  const Shape rows(grad.dims(), static_cast<size_t>(grad.rank() - 1));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("indices", args.indices, rows, ", one index a row of grad_output"));
  if (!args.indices.on_host) return {};
  return args.indices.dtype == DType::kInt32 ? CheckIndices<int32_t>(args) : CheckIndices<int64_t>(args);
}

std::vector<Shape> OutputShapes(const EmbeddingDenseBackwardArgs& args) {
  const Shape& grad = args.grad_output.shape;
  return {Shape{args.num_weights, grad[grad.rank() - 1]}};
}

}  // namespace gradfuse
