#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradient of an embedding's weight, as aten::embedding_dense_backward: row v is the sum of the rows of grad_output
// whose index is v, divided by their number with scale_grad_by_freq. Rows whose index is padding_idx do not count.
struct EmbeddingDenseBackwardArgs {
  static constexpr char kName[] = "EmbeddingDenseBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor grad_output;  // (*, C)
  Tensor indices;      // (*)
  int64_t num_weights = 0;
  int64_t padding_idx = -1;
  int64_t scale_grad_by_freq = 0;
  MutableTensor grad_weight;  // (num_weights, C)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kT);
    visitor.Input("indices", self.indices, TypeSet{DType::kInt64, DType::kInt32}.Checked());
    visitor.Attribute("num_weights", self.num_weights);
    visitor.Attribute("padding_idx", self.padding_idx);
    visitor.Attribute("scale_grad_by_freq", self.scale_grad_by_freq);
    visitor.Output("grad_weight", self.grad_weight, kT);
  }
};

GRADFUSE_DECLARE_OP(EmbeddingDenseBackwardArgs)

}  // namespace gradfuse
