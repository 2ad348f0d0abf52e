#include "kernels/embedding_dense_backward_add.h"

#include <algorithm>

#include "kernels/checks.h"
#include "kernels/cpu/rows_by_index.h"

namespace gradfuse {

Status Check(const EmbeddingDenseBackwardAddArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(Check(args.embedding));
  return CheckShape("base", args.base, OutputShapes(args.embedding).front());
}

std::vector<Shape> OutputShapes(const EmbeddingDenseBackwardAddArgs& args) { return OutputShapes(args.embedding); }

}  // namespace gradfuse

namespace gradfuse::cpu {
namespace {

constexpr int64_t kColumns = 512;
constexpr int64_t kCopied = 65536;
constexpr int64_t kRows = 64;

// The same roundings as those of EmbeddingDenseBackward and an addition.
void AddRows(const float* grad, int64_t columns, const int64_t* rows, int64_t count, float* out) {
  float sum[kColumns];
  for (int64_t begin = 0; begin < columns; begin += kColumns) {
    const int64_t width = std::min(kColumns, columns - begin);
    std::copy_n(grad + rows[0] * columns + begin, width, sum);
    for (int64_t i = 1; i < count; ++i) {
      const float* row = grad + rows[i] * columns + begin;
      for (int64_t c = 0; c < width; ++c) sum[c] += row[c];
    }
    for (int64_t c = 0; c < width; ++c) out[begin + c] += sum[c];
  }
}

}  // namespace

void Run(const EmbeddingDenseBackwardAddArgs& args, const ParallelFor& parallel) {
  const int64_t columns = args.sum.shape[1];
  const int64_t elements = args.sum.NumElements();
  if (elements == 0) return;
  const auto* base = args.base.Data<float>();
  auto* out = args.sum.MutableData<float>();
  if (base != out) {
    parallel((elements + kCopied - 1) / kCopied, 2 * args.sum.NumBytes(), [&](int64_t task) {
      const int64_t first = task * kCopied;
      std::copy_n(base + first, std::min(kCopied, elements - first), out + first);
    });
  }
  const EmbeddingDenseBackwardArgs& embedding = args.embedding;
  const RowsByIndex by_index(embedding);
  const auto* grad = embedding.grad_output.Data<float>();
  const int64_t indices = embedding.num_weights;
  parallel((indices + kRows - 1) / kRows, 2 * embedding.grad_output.NumBytes(), [&](int64_t task) {
    for (int64_t index = task * kRows; index < std::min(indices, (task + 1) * kRows); ++index) {
      const int64_t count = by_index.Count(index);
      if (count > 0) AddRows(grad, columns, by_index.Rows(index), count, out + index * columns);
    }
  });
}

}  // namespace gradfuse::cpu
