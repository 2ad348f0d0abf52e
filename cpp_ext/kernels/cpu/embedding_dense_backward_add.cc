#include "kernels/embedding_dense_backward_add.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/checks.h"

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

// A row of the weight and one of the gradient that is added to it.
using LookUp = std::pair<int64_t, int64_t>;

// By row of the weight, and for each in the order of the gradient.
template <class Index>
std::vector<LookUp> Sorted(const Index* indices, const EmbeddingDenseBackwardArgs& args) {
  std::vector<LookUp> found;
  found.reserve(static_cast<size_t>(args.indices.NumElements()));
  for (int64_t row = 0; row < args.indices.NumElements(); ++row) {
    if (indices[row] != args.padding_idx) found.emplace_back(indices[row], row);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// The same roundings as those of EmbeddingDenseBackward and an addition.
void AddRows(const float* grad, int64_t columns, const LookUp* first, const LookUp* last, float* out) {
  float sum[kColumns];
  for (int64_t begin = 0; begin < columns; begin += kColumns) {
    const int64_t count = std::min(kColumns, columns - begin);
    const float* row = grad + first->second * columns + begin;
    std::copy_n(row, count, sum);
    for (const LookUp* one = first + 1; one != last; ++one) {
      row = grad + one->second * columns + begin;
      for (int64_t c = 0; c < count; ++c) sum[c] += row[c];
    }
    for (int64_t c = 0; c < count; ++c) out[begin + c] += sum[c];
  }
}

}  // namespace

void Run(const EmbeddingDenseBackwardAddArgs& args, const ParallelFor& parallel) {
  const int64_t columns = args.sum.shape[1];
  const int64_t elements = args.sum.NumElements();
  const auto* base = args.base.Data<float>();
  auto* out = args.sum.MutableData<float>();
  if (base != out) {
    parallel((elements + kCopied - 1) / kCopied, 2 * args.sum.NumBytes(), [&](int64_t task) {
      const int64_t first = task * kCopied;
      std::copy_n(base + first, std::min(kCopied, elements - first), out + first);
    });
  }
  const EmbeddingDenseBackwardArgs& embedding = args.embedding;
  const std::vector<LookUp> sorted = embedding.indices.dtype == DType::kInt32
                                         ? Sorted(embedding.indices.Data<int32_t>(), embedding)
                                         : Sorted(embedding.indices.Data<int64_t>(), embedding);
  std::vector<size_t> starts;
  for (size_t at = 0; at < sorted.size(); ++at) {
    if (at == 0 || sorted[at].first != sorted[at - 1].first) starts.push_back(at);
  }
  starts.push_back(sorted.size());
  const auto* grad = embedding.grad_output.Data<float>();
  parallel(static_cast<int64_t>(starts.size()) - 1, 2 * embedding.grad_output.NumBytes(), [&](int64_t task) {
    const LookUp* first = sorted.data() + starts[static_cast<size_t>(task)];
    const LookUp* last = sorted.data() + starts[static_cast<size_t>(task) + 1];
    AddRows(grad, columns, first, last, out + first->first * columns);
  });
}

}  // namespace gradfuse::cpu
