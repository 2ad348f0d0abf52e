#include "kernels/embedding_dense_backward_add.h"

#include "kernels/checks.h"

namespace gradfuse {

Status Check(const EmbeddingDenseBackwardAddArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(Check(args.embedding));
  return CheckShape("base", args.base, OutputShapes(args.embedding).front());
}

std::vector<Shape> OutputShapes(const EmbeddingDenseBackwardAddArgs& args) { return OutputShapes(args.embedding); }

}  // namespace gradfuse
