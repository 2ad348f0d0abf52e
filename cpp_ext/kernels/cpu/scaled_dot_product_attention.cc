#include "gradfuse/ops/scaled_dot_product_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/flush_subnormals.h"
#include "kernels/cpu/matrix_products.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/scaled_dot_product_attention.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/score_rows-inl.h"

// Dao, FlashAttention-2 (2023), section 3.1: blocks of keys come one after the other, and each row of the output is
// kept as a sum relative to the largest score so far.

// What the loops of all instruction sets share.
#ifndef GRADFUSE_SCALED_DOT_PRODUCT_ATTENTION_SHARED
#define GRADFUSE_SCALED_DOT_PRODUCT_ATTENTION_SHARED
namespace gradfuse::cpu {
namespace {

// Of rows that have seen some keys. Where those are none, or all hidden, largest is -inf and sum 0.
template <class Real>
struct RowStates {
  Real largest[kBlockRows] = {};  // score
  Real shift[kBlockRows] = {};    // the same, and 0 for -inf
  Real sum[kBlockRows] = {};      // of exp(score - shift)
  Real factor[kBlockRows] = {};   // exp(shift before - shift) of the last keys
  bool begun = false;
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// Moves rows on to the largest scores with those of a block. Returns whether any of them was passed.
template <class T, MaskKind kKind>
bool Raise(const ScoreBlock<T>& block, const ComputeType<T>* products, RowStates<ComputeType<T>>& states) {
  using Real = ComputeType<T>;
  const TagOf<T> d;
  const auto scale = hn::Set(d, block.scale);
  const auto never = hn::Set(d, -std::numeric_limits<Real>::infinity());
  RowMask<T, kKind> masks(block);
  Real largest[kBlockRows];
  for (int64_t r = 0; r < block.rows; ++r) {
    const auto* const mask = masks.Of(r);
    const Real* const row = products + r * kBlockKeys;
    auto most = never;
    ForEachVector(d, block.seen[static_cast<size_t>(r)], [&](int64_t i, auto at) HWY_ATTR {
      most = hn::Max(most, MaskedScores<T, kKind>(at, row, i, scale, mask));
    });
    largest[r] = std::max(states.largest[r], hn::ReduceMax(d, most));
  }
  bool passed = false;
  ForEachVector(d, block.rows, [&](int64_t r, auto at) HWY_ATTR {
    const auto now = Load(at, d, largest + r);
    const auto shift = hn::IfThenElse(now == never, hn::Zero(d), now);
    const auto before = Load(at, d, states.largest + r);
    passed = passed || !hn::AllFalse(d, now > before);
    Store(at, Exp<Real>(d, before - shift), d, states.factor + r);
    Store(at, shift, d, states.shift + r);
    Store(at, now, d, states.largest + r);
  });
  return passed;
}

// Replaces products by exp(score - shift), times what the dropout makes of 1, and adds up the former.
template <class T, MaskKind kKind>
void Exponentials(const ScoreBlock<T>& block, ComputeType<T>* products, RowStates<ComputeType<T>>& states) {
  using Real = ComputeType<T>;
  const TagOf<T> d;
  const auto scale = hn::Set(d, block.scale);
  RowMask<T, kKind> masks(block);
  Real gains[kBlockKeys];
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t seen = block.seen[static_cast<size_t>(r)];
    const auto* const mask = masks.Of(r);
    Real* const row = products + r * kBlockKeys;
    const auto shift = hn::Set(d, states.shift[r]);
    auto sum = hn::Zero(d);
    ForEachVector(d, seen, [&](int64_t i, auto at) HWY_ATTR {
      const auto part = Exp<Real>(d, MaskedScores<T, kKind>(at, row, i, scale, mask) - shift);
      sum = sum + part;
      Store(at, part, d, row + i);
    });
    std::fill(row + seen, row + block.keys, Real{0});
    states.sum[r] = states.sum[r] * states.factor[r] + hn::ReduceSum(d, sum);
    if (block.dropout == nullptr) continue;
    DropoutGains(*block.dropout, block.place + static_cast<uint32_t>(r) * block.row_places, seen, gains);
    ForEachVector(d, seen, [&](int64_t i, auto at) HWY_ATTR {
      Store(at, Load(at, d, row + i) * Load(at, d, gains + i), d, row + i);
    });
  }
}

template <class Real>
void MultiplyRowsBy(const Real* factors, int64_t rows, int64_t width, Real* numbers) {
  const TagOf<Real> d;
  for (int64_t r = 0; r < rows; ++r) {
    const auto factor = hn::Set(d, factors[r]);
    Real* const row = numbers + r * width;
    ForEachVector(d, width, [&](int64_t i, auto at) HWY_ATTR { Store(at, Load(at, d, row + i) * factor, d, row + i); });
  }
}

template <class T>
void WriteRows(const ComputeType<T>* sums, const ComputeType<T>* factors, int64_t rows, int64_t width, T* out) {
  const TagOf<T> d;
  for (int64_t r = 0; r < rows; ++r) {
    const auto factor = hn::Set(d, factors[r]);
    ForEachVector(d, width, [&](int64_t i, auto at) HWY_ATTR {
      Store(at, Load(at, d, sums + r * width + i) * factor, d, out + r * width + i);
    });
  }
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// As many rows go together as make the packing of keys cheap, and fewer where there would be few tasks.
constexpr int64_t kMostBlocks = 4;
constexpr int64_t kWantedTasks = 16;

template <class T, MaskKind kKind>
class Kernel {
 public:
  Kernel(const ScaledDotProductAttentionArgs& args, const ParallelFor& parallel)
      : args_(args), parallel_(parallel), blocks_(args), sizes_(blocks_.sizes()) {}

  void Run() const {
    const int64_t heads = sizes_.batch * sizes_.heads;
    if (heads == 0 || sizes_.rows == 0) return;
    const int64_t row_blocks = CeilDiv(sizes_.rows, kBlockRows);
    const int64_t wanted = std::clamp(CeilDiv(kWantedTasks, heads), CeilDiv(row_blocks, kMostBlocks), row_blocks);
    const int64_t rows_of_task = CeilDiv(row_blocks, wanted) * kBlockRows;
    const int64_t tasks_of_head = CeilDiv(sizes_.rows, rows_of_task);
    constexpr int64_t kProductsPerByte = 4;  // that take as long as a byte that is moved
    const int64_t products = heads * sizes_.rows * sizes_.keys * (sizes_.width + sizes_.value_width);
    parallel_(heads * tasks_of_head, products / kProductsPerByte, [&](int64_t task) {
      const FlushSubnormals flush;
      const int64_t first = task % tasks_of_head * rows_of_task;
      RunRows(task / tasks_of_head, first, std::min(rows_of_task, sizes_.rows - first));
    });
  }

 private:
  using Real = ComputeType<T>;

  void RunRows(int64_t head, int64_t first_row, int64_t row_count) const {
    const int64_t width = sizes_.width;
    const int64_t value_width = sizes_.value_width;
    const int64_t row_blocks = CeilDiv(row_count, kBlockRows);
    const T* const query = args_.query.Data<T>() + (head * sizes_.rows + first_row) * width;
    const T* const keys = args_.key.Data<T>() + sizes_.KeyHead(head) * sizes_.keys * width;
    const T* const values = args_.value.Data<T>() + sizes_.KeyHead(head) * sizes_.keys * value_width;
    T* const output = args_.output.MutableData<T>() + (head * sizes_.rows + first_row) * value_width;
    Real* const logsumexp = args_.logsumexp.MutableData<Real>() + head * sizes_.rows + first_row;

    const int64_t query_size = PackedLeftSize<Real>(kBlockRows, width);
    const Lines<Real> packed_query(row_blocks * query_size);
    const Lines<Real> packed_keys(PackedRightSize<Real>(width, kBlockKeys));
    const Lines<Real> packed_values(PackedRightSize<Real>(kBlockKeys, value_width));
    const Lines<Real> products(kBlockRows * kBlockKeys);
    const Lines<Real> wide_output(std::is_same_v<T, Real> ? 0 : row_count * value_width);
    Real* sums;
    if constexpr (std::is_same_v<T, Real>) {
      sums = output;
    } else {
      sums = wide_output.data();
    }
    RowStates<Real> states[kMostBlocks];
    const auto rows_of = [&](int64_t block) { return std::min(kBlockRows, row_count - block * kBlockRows); };
    for (int64_t b = 0; b < row_blocks; ++b) {
      PackLeft<T>({query + b * kBlockRows * width, width, 1}, rows_of(b), width, packed_query.data() + b * query_size);
      std::fill_n(states[b].largest, kBlockRows, -std::numeric_limits<Real>::infinity());
      std::fill_n(states[b].shift, kBlockRows, Real{0});
      std::fill_n(states[b].sum, kBlockRows, Real{0});
    }

    const auto raise = GRADFUSE_DISPATCH(Raise<T, kKind>);
    const auto exponentials = GRADFUSE_DISPATCH(Exponentials<T, kKind>);
    const auto multiply_rows_by = GRADFUSE_DISPATCH(MultiplyRowsBy<Real>);
    const int64_t end = blocks_.causal().Seen(first_row + row_count - 1);
    for (int64_t first_key = 0; first_key < end; first_key += kBlockKeys) {
      const int64_t key_count = std::min(kBlockKeys, sizes_.keys - first_key);
      PackRight<T>({keys + first_key * width, 1, width}, width, key_count, packed_keys.data());
      PackRight<T>({values + first_key * value_width, value_width, 1}, key_count, value_width, packed_values.data());
      for (int64_t b = 0; b < row_blocks; ++b) {
        const int64_t rows = rows_of(b);
        const ScoreBlock<T> block = blocks_.Block(head, first_row + b * kBlockRows, rows, first_key, key_count);
        if (!block.any_seen) continue;
        RowStates<Real>& state = states[b];
        Real* const block_sums = sums + b * kBlockRows * value_width;
        MultiplyPacked(packed_query.data() + b * query_size, packed_keys.data(), rows, key_count, width,
                       products.data(), kBlockKeys, false);
        if (raise(block, products.data(), state) && state.begun) {
          multiply_rows_by(state.factor, rows, value_width, block_sums);
        }
        exponentials(block, products.data(), state);
        MultiplyRows(products.data(), kBlockKeys, packed_values.data(), rows, value_width, key_count, block_sums,
                     value_width, state.begun);
        state.begun = true;
      }
    }

    const auto write_rows = GRADFUSE_DISPATCH(WriteRows<T>);
    for (int64_t b = 0; b < row_blocks; ++b) {
      RowStates<Real>& state = states[b];
      Real* const block_sums = sums + b * kBlockRows * value_width;
      if (!state.begun) std::fill_n(block_sums, rows_of(b) * value_width, Real{0});
      for (int64_t r = 0; r < rows_of(b); ++r) {
        const Real sum = state.sum[r] == 0 ? Real{1} : state.sum[r];
        state.factor[r] = 1 / sum;
        logsumexp[b * kBlockRows + r] = state.shift[r] + std::log(sum);
      }
      write_rows(block_sums, state.factor, rows_of(b), value_width, output + b * kBlockRows * value_width);
    }
  }

  const ScaledDotProductAttentionArgs& args_;
  const ParallelFor& parallel_;
  const ScoreBlocks<T> blocks_;
  const AttentionSizes& sizes_;
};

}  // namespace

void Run(const ScaledDotProductAttentionArgs& args, const ParallelFor& parallel) { RunKernel<Kernel>(args, parallel); }

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
