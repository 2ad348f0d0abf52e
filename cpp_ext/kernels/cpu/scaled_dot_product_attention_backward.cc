#include "gradfuse/ops/scaled_dot_product_attention_backward.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/flush_subnormals.h"
#include "kernels/cpu/matrix_products.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/scaled_dot_product_attention_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/score_rows-inl.h"

// Dao, FlashAttention-2 (2023), section 3.1, the backward pass: probabilities are computed again, block by block.

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// The sum of grad_output output over each row.
template <class T>
void SumRows(const T* grad_output, const T* output, int64_t rows, int64_t width, ComputeType<T>* sums) {
  const TagOf<T> d;
  for (int64_t r = 0; r < rows; ++r) {
    auto sum = hn::Zero(d);
    ForEachVector(d, width, [&](int64_t i, auto at) HWY_ATTR {
      sum = hn::MulAdd(Load(at, d, grad_output + r * width + i), Load(at, d, output + r * width + i), sum);
    });
    sums[r] = hn::ReduceSum(d, sum);
  }
}

// Adds the exponentials of scores less logsumexp to the sums of rows.
template <class T, MaskKind kKind>
void AddExponentials(const ScoreBlock<T>& block, const ComputeType<T>* logsumexp, const ComputeType<T>* products,
                     ComputeType<T>* sums) {
  using Real = ComputeType<T>;
  const TagOf<T> d;
  const auto scale = hn::Set(d, block.scale);
  RowMask<T, kKind> masks(block);
  for (int64_t r = 0; r < block.rows; ++r) {
    const auto* const mask = masks.Of(r);
    const Real* const row = products + r * kBlockKeys;
    const auto shift = hn::Set(d, logsumexp[r]);
    auto sum = hn::Zero(d);
    ForEachVector(d, block.seen[static_cast<size_t>(r)], [&](int64_t i, auto at) HWY_ATTR {
      sum = sum + Exp<Real>(d, MaskedScores<T, kKind>(at, row, i, scale, mask) - shift);
    });
    sums[r] += hn::ReduceSum(d, sum);
  }
}

// Replaces products of queries and keys by probabilities, times what the dropout makes of 1, and those of grad_output
// and values by the gradients of the products.
template <class T, MaskKind kKind>
void GradScores(const ScoreBlock<T>& block, const ComputeType<T>* logsumexp, const ComputeType<T>* shares,
                const ComputeType<T>* row_sums, ComputeType<T>* products, ComputeType<T>* grads) {
  using Real = ComputeType<T>;
  const TagOf<T> d;
  const auto scale = hn::Set(d, block.scale);
  RowMask<T, kKind> masks(block);
  Real gains[kBlockKeys];
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t seen = block.seen[static_cast<size_t>(r)];
    const auto* const mask = masks.Of(r);
    Real* const row = products + r * kBlockKeys;
    Real* const grad_row = grads + r * kBlockKeys;
    const auto shift = hn::Set(d, logsumexp[r]);
    const auto row_sum = hn::Set(d, row_sums[r]);
    const auto share = hn::Set(d, kKind == MaskKind::kAdded ? shares[r] : Real{1});
    const auto probabilities = [&](int64_t i, auto at) HWY_ATTR {
      const auto p = Exp<Real>(d, MaskedScores<T, kKind>(at, row, i, scale, mask) - shift);
      if constexpr (kKind == MaskKind::kAdded) return p * share;
      return p;
    };
    if (block.dropout == nullptr) {
      ForEachVector(d, seen, [&](int64_t i, auto at) HWY_ATTR {
        const auto p = probabilities(i, at);
        Store(at, p, d, row + i);
        Store(at, p * (Load(at, d, grad_row + i) - row_sum) * scale, d, grad_row + i);
      });
    } else {
      DropoutGains(*block.dropout, block.place + static_cast<uint32_t>(r) * block.row_places, seen, gains);
      ForEachVector(d, seen, [&](int64_t i, auto at) HWY_ATTR {
        const auto p = probabilities(i, at);
        const auto gain = Load(at, d, gains + i);
        Store(at, p * gain, d, row + i);
        Store(at, p * hn::MulSub(gain, Load(at, d, grad_row + i), row_sum) * scale, d, grad_row + i);
      });
    }
    std::fill(row + seen, row + block.keys, Real{0});
    std::fill(grad_row + seen, grad_row + block.keys, Real{0});
  }
}

// out = the sum of some parts, which lie `pitch` apart, in their order.
template <class T>
void AddParts(const ComputeType<T>* parts, int64_t part_count, int64_t pitch, int64_t count, T* out) {
  const TagOf<T> d;
  ForEachVector(d, count, [&](int64_t i, auto at) HWY_ATTR {
    auto sum = Load(at, d, parts + i);
    for (int64_t part = 1; part < part_count; ++part) sum = sum + Load(at, d, parts + part * pitch + i);
    Store(at, sum, d, out + i);
  });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

constexpr int64_t kWantedTasks = 16;
// Rows that are packed at once, with this many numbers in all, stay in the second-level cache while all keys pass.
constexpr int64_t kPackedNumbers = 49152;

// What tasks add a gradient to: the tensor itself, or where several tasks add to it or its type is short, numbers of
// their own that are added up in the end.
template <class T>
class GradSums {
 public:
  using Real = ComputeType<T>;

  GradSums(const MutableTensor& tensor, int64_t part_count)
      : out_(tensor.MutableData<T>()), count_(tensor.NumElements()), part_count_(part_count) {
    if (part_count > 1 || !std::is_same_v<T, Real>) parts_ = Lines<Real>(part_count * count_);
  }

  Real* Part(int64_t part) const {
    if constexpr (std::is_same_v<T, Real>) {
      if (part_count_ == 1) return out_;
    }
    return parts_.data() + part * count_;
  }

  void Finish(const ParallelFor& parallel) const {
    if (parts_.data() == nullptr) return;
    constexpr int64_t kTask = 16384;
    const auto add_parts = GRADFUSE_DISPATCH(AddParts<T>);
    parallel(CeilDiv(count_, kTask), (part_count_ + 1) * count_ * static_cast<int64_t>(sizeof(Real)),
             [&](int64_t task) {
               const int64_t begin = task * kTask;
               add_parts(parts_.data() + begin, part_count_, count_, std::min(kTask, count_ - begin), out_ + begin);
             });
  }

 private:
  T* out_;
  int64_t count_;
  int64_t part_count_;
  Lines<Real> parts_;
};

// A task has some of the heads of queries that share a head of keys, and some of the keys. It adds to gradients of its
// own: those of these keys and values from these heads, and those of these queries from these keys.
template <class T, MaskKind kKind>
class Kernel {
 public:
  Kernel(const ScaledDotProductAttentionBackwardArgs& args, const ParallelFor& parallel)
      : args_(args), parallel_(parallel), blocks_(args), sizes_(blocks_.sizes()) {}

  void Run() const {
    const int64_t key_heads = sizes_.batch * sizes_.groups;
    if (key_heads == 0) return;
    const int64_t shared = sizes_.heads / sizes_.groups;
    // As many tasks as are wanted, of single heads first, and of fewer keys where those are not enough.
    const int64_t heads_together = CeilDiv(shared, std::min(shared, CeilDiv(kWantedTasks, key_heads)));
    const int64_t head_parts = CeilDiv(shared, heads_together);
    const int64_t key_blocks = std::max<int64_t>(1, CeilDiv(sizes_.keys, kBlockKeys));
    const int64_t wanted = std::min(key_blocks, CeilDiv(kWantedTasks, key_heads * head_parts));
    const int64_t keys_together = CeilDiv(key_blocks, wanted) * kBlockKeys;
    const int64_t key_parts = std::max<int64_t>(1, CeilDiv(sizes_.keys, keys_together));

    const GradSums<T> grad_query(args_.grad_query, key_parts);
    const GradSums<T> grad_key(args_.grad_key, head_parts);
    const GradSums<T> grad_value(args_.grad_value, head_parts);
    constexpr int64_t kProductsPerByte = 4;  // that take as long as a byte that is moved
    const int64_t products =
        sizes_.batch * sizes_.heads * sizes_.rows * sizes_.keys * (3 * sizes_.width + 2 * sizes_.value_width);
    parallel_(key_heads * head_parts * key_parts, products / kProductsPerByte, [&](int64_t task) {
      const FlushSubnormals flush;
      const int64_t key_part = task % key_parts;
      const int64_t head_part = task / key_parts % head_parts;
      const int64_t key_head = task / key_parts / head_parts;
      const int64_t first_head = head_part * heads_together;
      const int64_t first_key = key_part * keys_together;
      const Part part{key_head,
                      key_head * shared + first_head,
                      std::min(heads_together, shared - first_head),
                      first_key,
                      std::min(keys_together, sizes_.keys - first_key),
                      grad_query.Part(key_part),
                      grad_key.Part(head_part) + key_head * sizes_.keys * sizes_.width,
                      grad_value.Part(head_part) + key_head * sizes_.keys * sizes_.value_width};
      RunPart(part);
    });
    grad_query.Finish(parallel_);
    grad_key.Finish(parallel_);
    grad_value.Finish(parallel_);
  }

 private:
  using Real = ComputeType<T>;

  struct Part {
    int64_t key_head;
    int64_t first_head;
    int64_t head_count;
    int64_t first_key;
    int64_t key_count;
    Real* grad_query;  // of all heads
    Real* grad_key;    // of the head
    Real* grad_value;
  };

  // Memory of a task, of the same sizes whatever the lengths.
  struct Work {
    Work(int64_t row_blocks, int64_t width, int64_t value_width)
        : query_left(row_blocks * PackedLeftSize<Real>(kBlockRows, width)),
          query_right(row_blocks * PackedRightSize<Real>(kBlockRows, width)),
          grad_left(row_blocks * PackedLeftSize<Real>(kBlockRows, value_width)),
          grad_right(row_blocks * PackedRightSize<Real>(kBlockRows, value_width)),
          row_sums(row_blocks * kBlockRows),
          shares(row_blocks * kBlockRows),
          keys_turned(PackedRightSize<Real>(width, kBlockKeys)),
          keys(PackedRightSize<Real>(kBlockKeys, width)),
          values_turned(PackedRightSize<Real>(value_width, kBlockKeys)),
          products(kBlockRows * kBlockKeys),
          grads(kBlockRows * kBlockKeys) {}

    Lines<Real> query_left;
    Lines<Real> query_right;
    Lines<Real> grad_left;
    Lines<Real> grad_right;
    Lines<Real> row_sums;
    Lines<Real> shares;
    Lines<Real> keys_turned;
    Lines<Real> keys;
    Lines<Real> values_turned;
    Lines<Real> products;
    Lines<Real> grads;
  };

  void RunPart(const Part& part) const {
    const int64_t width = sizes_.width;
    const int64_t value_width = sizes_.value_width;
    std::fill_n(part.grad_key + part.first_key * width, part.key_count * width, Real{0});
    std::fill_n(part.grad_value + part.first_key * value_width, part.key_count * value_width, Real{0});
    const int64_t block_size = kBlockRows * std::max<int64_t>({1, width, value_width});
    const int64_t most_blocks = std::max<int64_t>(1, kPackedNumbers / block_size);
    const int64_t blocks_together = std::min(most_blocks, CeilDiv(sizes_.rows, kBlockRows));
    const Work work(blocks_together, width, value_width);
    for (int64_t head = part.first_head; head < part.first_head + part.head_count; ++head) {
      std::fill_n(part.grad_query + head * sizes_.rows * width, sizes_.rows * width, Real{0});
      const int64_t first = blocks_.causal().FirstRow(part.first_key) / kBlockRows * kBlockRows;
      for (int64_t row = first; row < sizes_.rows; row += blocks_together * kBlockRows) {
        RunRows(part, head, row, std::min(blocks_together * kBlockRows, sizes_.rows - row), work);
      }
    }
  }

  void RunRows(const Part& part, int64_t head, int64_t first_row, int64_t row_count, const Work& work) const {
    const int64_t width = sizes_.width;
    const int64_t value_width = sizes_.value_width;
    const T* const query = args_.query.Data<T>() + head * sizes_.rows * width;
    const T* const grad_output = args_.grad_output.Data<T>() + head * sizes_.rows * value_width;
    const T* const output = args_.output.Data<T>() + head * sizes_.rows * value_width;
    const T* const keys = args_.key.Data<T>() + part.key_head * sizes_.keys * width;
    const T* const values = args_.value.Data<T>() + part.key_head * sizes_.keys * value_width;
    const Real* const logsumexp = args_.logsumexp.Data<Real>() + head * sizes_.rows;
    Real* const grad_query = part.grad_query + head * sizes_.rows * width;

    const int64_t query_left_size = PackedLeftSize<Real>(kBlockRows, width);
    const int64_t query_right_size = PackedRightSize<Real>(kBlockRows, width);
    const int64_t grad_left_size = PackedLeftSize<Real>(kBlockRows, value_width);
    const int64_t grad_right_size = PackedRightSize<Real>(kBlockRows, value_width);
    const int64_t row_blocks = CeilDiv(row_count, kBlockRows);
    for (int64_t b = 0; b < row_blocks; ++b) {
      const int64_t row = first_row + b * kBlockRows;
      const int64_t rows = std::min(kBlockRows, first_row + row_count - row);
      const Matrix<T> queries{query + row * width, width, 1};
      const Matrix<T> grads{grad_output + row * value_width, value_width, 1};
      PackLeft<T>(queries, rows, width, work.query_left.data() + b * query_left_size);
      PackRight<T>(queries, rows, width, work.query_right.data() + b * query_right_size);
      PackLeft<T>(grads, rows, value_width, work.grad_left.data() + b * grad_left_size);
      PackRight<T>(grads, rows, value_width, work.grad_right.data() + b * grad_right_size);
    }
    GRADFUSE_DISPATCH(SumRows<T>)
    (grad_output + first_row * value_width, output + first_row * value_width, row_count, value_width,
     work.row_sums.data());

    SetShares(part, head, first_row, row_count, work);
    const auto grad_scores = GRADFUSE_DISPATCH(GradScores<T, kKind>);
    Real* const products = work.products.data();
    Real* const grads = work.grads.data();
    const int64_t part_end = part.first_key + part.key_count;
    const int64_t end = std::min(part_end, blocks_.causal().Seen(first_row + row_count - 1));
    for (int64_t first_key = part.first_key; first_key < end; first_key += kBlockKeys) {
      const int64_t key_count = std::min(kBlockKeys, part_end - first_key);
      const Matrix<T> key_rows{keys + first_key * width, width, 1};
      const Matrix<T> value_rows{values + first_key * value_width, value_width, 1};
      PackRight<T>(key_rows.Transposed(), width, key_count, work.keys_turned.data());
      PackRight<T>(key_rows, key_count, width, work.keys.data());
      PackRight<T>(value_rows.Transposed(), value_width, key_count, work.values_turned.data());
      for (int64_t b = 0; b < row_blocks; ++b) {
        const int64_t top = first_row + b * kBlockRows;
        const int64_t height = std::min(kBlockRows, first_row + row_count - top);
        const ScoreBlock<T> block = blocks_.Block(head, top, height, first_key, key_count);
        if (!block.any_seen) continue;
        MultiplyPacked(work.query_left.data() + b * query_left_size, work.keys_turned.data(), height, key_count, width,
                       products, kBlockKeys, false);
        MultiplyPacked(work.grad_left.data() + b * grad_left_size, work.values_turned.data(), height, key_count,
                       value_width, grads, kBlockKeys, false);
        grad_scores(block, logsumexp + top, work.shares.data() + b * kBlockRows, work.row_sums.data() + b * kBlockRows,
                    products, grads);
        MultiplyColumns(products, kBlockKeys, work.grad_right.data() + b * grad_right_size, key_count, value_width,
                        height, part.grad_value + first_key * value_width, value_width, true);
        MultiplyColumns(grads, kBlockKeys, work.query_right.data() + b * query_right_size, key_count, width, height,
                        part.grad_key + first_key * width, width, true);
        MultiplyRows(grads, kBlockKeys, work.keys.data(), height, width, key_count, grad_query + top * width, width,
                     true);
      }
    }
  }

  // Sets what the exponentials of scores less logsumexp of each row are multiplied by.
  void SetShares(const Part& part, int64_t head, int64_t first_row, int64_t row_count, const Work& work) const {
    Real* const shares = work.shares.data();
    std::fill_n(shares, row_count, Real{1});
    if constexpr (kKind == MaskKind::kAdded) {
      const Real* const logsumexp = args_.logsumexp.Data<Real>() + head * sizes_.rows + first_row;
      if (std::none_of(logsumexp, logsumexp + row_count, HasFewDigits<Real>)) return;
      const auto add = GRADFUSE_DISPATCH(AddExponentials<T, kKind>);
      const T* const keys = args_.key.Data<T>() + part.key_head * sizes_.keys * sizes_.width;
      const Lines<Real> sums(row_count);
      std::fill_n(sums.data(), row_count, Real{0});
      for (int64_t first_key = 0; first_key < sizes_.keys; first_key += kBlockKeys) {
        const int64_t key_count = std::min(kBlockKeys, sizes_.keys - first_key);
        const Matrix<T> key_rows{keys + first_key * sizes_.width, sizes_.width, 1};
        PackRight<T>(key_rows.Transposed(), sizes_.width, key_count, work.keys_turned.data());
        for (int64_t row = 0; row < row_count; row += kBlockRows) {
          const int64_t rows = std::min(kBlockRows, row_count - row);
          MultiplyPacked(work.query_left.data() + row / kBlockRows * PackedLeftSize<Real>(kBlockRows, sizes_.width),
                         work.keys_turned.data(), rows, key_count, sizes_.width, work.products.data(), kBlockKeys,
                         false);
          add(blocks_.Block(head, first_row + row, rows, first_key, key_count), logsumexp + row, work.products.data(),
              sums.data() + row);
        }
      }
      for (int64_t r = 0; r < row_count; ++r) {
        if (HasFewDigits(logsumexp[r])) shares[r] = 1 / sums.data()[r];
      }
    }
  }

  const ScaledDotProductAttentionBackwardArgs& args_;
  const ParallelFor& parallel_;
  const ScoreBlocks<T> blocks_;
  const AttentionSizes& sizes_;
};

}  // namespace

void Run(const ScaledDotProductAttentionBackwardArgs& args, const ParallelFor& parallel) {
  RunKernel<Kernel>(args, parallel);
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
