#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradfuse/ops/embedding_dense_backward.h"

namespace gradfuse::cpu {

// The rows of the gradient by their index, in order.
class RowsByIndex {
 public:
  explicit RowsByIndex(const EmbeddingDenseBackwardArgs& args) : begin_(static_cast<size_t>(args.num_weights) + 1) {
    if (args.indices.dtype == DType::kInt32) {
      Sort(args.indices.Data<int32_t>(), args);
    } else {
      Sort(args.indices.Data<int64_t>(), args);
    }
  }

  int64_t Count(int64_t index) const { return At(index + 1) - At(index); }
  const int64_t* Rows(int64_t index) const { return rows_.data() + At(index); }

 private:
  int64_t At(int64_t index) const { return begin_[static_cast<size_t>(index)]; }

  template <class Index>
  void Sort(const Index* indices, const EmbeddingDenseBackwardArgs& args) {
    const int64_t count = args.indices.NumElements();
    const auto counts = [&](int64_t row) { return indices[row] != args.padding_idx; };
    for (int64_t row = 0; row < count; ++row) {
      if (counts(row)) ++begin_[static_cast<size_t>(indices[row]) + 1];
    }
    for (size_t index = 1; index < begin_.size(); ++index) begin_[index] += begin_[index - 1];
    rows_.resize(static_cast<size_t>(begin_.back()));
    std::vector<int64_t> next(begin_.begin(), begin_.end() - 1);
    for (int64_t row = 0; row < count; ++row) {
      if (counts(row)) rows_[static_cast<size_t>(next[static_cast<size_t>(indices[row])]++)] = row;
    }
  }

  std::vector<int64_t> begin_;
  std::vector<int64_t> rows_;
};

}  // namespace gradfuse::cpu
