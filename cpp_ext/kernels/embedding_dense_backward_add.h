#pragma once

#include <vector>

#include "gradfuse/ops/embedding_dense_backward.h"

namespace gradfuse {

// base + EmbeddingDenseBackward: the gradient of a weight that is used elsewhere as well, such as one tied to the
// output layer's, without a tensor for the embedding's share. No file has it: TrainingSession puts it into what it
// runs.
struct EmbeddingDenseBackwardAddArgs {
  static constexpr char kName[] = "EmbeddingDenseBackwardAdd";
  static constexpr TypeSet kTypes{DType::kFloat32};
  static constexpr int kOverwrittenInput = 0;  // base

  Tensor base;                           // (num_weights, C)
  EmbeddingDenseBackwardArgs embedding;  // without scale_grad_by_freq
  MutableTensor sum;                     // (num_weights, C)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("base", self.base, kT);
    visitor.Input("grad_output", self.embedding.grad_output, kT);
    visitor.Input("indices", self.embedding.indices, TypeSet{DType::kInt64, DType::kInt32}.Checked());
    visitor.Attribute("num_weights", self.embedding.num_weights);
    visitor.Attribute("padding_idx", self.embedding.padding_idx);
    visitor.Output("sum", self.sum, kT);
  }
};

Status Check(const EmbeddingDenseBackwardAddArgs& args);
std::vector<Shape> OutputShapes(const EmbeddingDenseBackwardAddArgs& args);
namespace cpu {
void Run(const EmbeddingDenseBackwardAddArgs& args, const ParallelFor& parallel);
}

}  // namespace gradfuse
