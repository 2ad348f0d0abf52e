#include "gradfuse/ops/grouped_bias_add_grad.h"

#include <algorithm>
#include <memory>

#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/grouped_bias_add_grad.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// The sum of vectors at `row` and in the kRows - 1 rows after it.
template <int kRows, class At, class D, class T>
GRADFUSE_INLINE hn::Vec<D> SumOfRows(At at, D d, const T* row, int64_t stride) {
  if constexpr (kRows == 1) {
    return Load(at, d, row);
  } else {
    return SumOfRows<kRows / 2>(at, d, row, stride) + SumOfRows<kRows / 2>(at, d, row + kRows / 2 * stride, stride);
  }
}

// How many rows ahead memory is asked for: rows are too short for the processor to see by itself where it goes on. Rows
// of the next group are read next as well.
constexpr int64_t kRowsAhead = 8;

// sum += the columns of kRows rows that lie `stride` apart.
template <int kRows, class T>
GRADFUSE_INLINE void AddTogether(const T* rows, int64_t stride, int64_t columns, float* sum) {
  const TagOf<T> d;
  ForEachVector(d, columns, [&](int64_t c, auto at) HWY_ATTR {
    for (int row = 0; row < kRows; ++row) PrefetchFar(d, rows + (kRowsAhead + row) * stride + c);
    Store(at, Load(at, d, sum + c) + SumOfRows<kRows>(at, d, rows + c, stride), d, sum + c);
  });
}

// sum += the columns of `count` rows that lie `stride` apart.
template <class T>
void AddRows(const T* rows, int64_t count, int64_t stride, int64_t columns, float* sum) {
  int64_t row = 0;
  for (; row + 8 <= count; row += 8) AddTogether<8>(rows + row * stride, stride, columns, sum);
  if (row + 4 <= count) {
    AddTogether<4>(rows + row * stride, stride, columns, sum);
    row += 4;
  }
  for (; row < count; ++row) AddTogether<1>(rows + row * stride, stride, columns, sum);
}

template <class T>
void Round(const float* sum, int64_t columns, T* out) {
  const TagOf<T> d;
  ForEachVector(d, columns, [&](int64_t c, auto at) HWY_ATTR { Store(at, Load(at, d, sum + c), d, out + c); });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// Few sums of chunks to keep where there are many rows, but chunks for all threads where there are few.
int64_t RowsPerChunk(int64_t rows) { return rows < (16 << 10) ? 128 : 256; }

constexpr int64_t kColumnsPerPanel = 2048;

// The rows of each group. They lie one after the other, so that one end a group says all.
class Groups {
 public:
  explicit Groups(const GroupedBiasAddGradArgs& args)
      : count_(args.grad_bias.shape[0]), group_size_(args.group_idx ? 0 : args.grad_y.shape[1]) {
    if (args.group_idx && args.group_idx->dtype == DType::kInt32) ends32_ = args.group_idx->Data<int32_t>();
    if (args.group_idx && args.group_idx->dtype == DType::kInt64) ends64_ = args.group_idx->Data<int64_t>();
  }

  int64_t count() const { return count_; }
  int64_t Begin(int64_t group) const { return group == 0 ? 0 : End(group - 1); }
  int64_t End(int64_t group) const {
    if (ends32_) return ends32_[group];
    if (ends64_) return ends64_[group];
    return (group + 1) * group_size_;
  }

  // The group that `row` belongs to.
  int64_t Of(int64_t row) const {
    int64_t low = 0;
    int64_t high = count_ - 1;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (End(middle) > row) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

 private:
  int64_t count_;
  int64_t group_size_;
  const int32_t* ends32_ = nullptr;
  const int64_t* ends64_ = nullptr;
};

// Rows are summed in chunks that do not depend on the groups. A group inside one chunk is done with it; one that
// reaches over chunks leaves a partial sum in each, and these are added up in order, in double. Of the groups in a
// chunk only the first and the last can reach over, so two partial sums a chunk are room enough.
template <class T>
void RunTyped(const GroupedBiasAddGradArgs& args, const ParallelFor& parallel) {
  const Groups groups(args);
  const int64_t columns = args.grad_bias.shape[1];
  if (groups.count() == 0 || columns == 0) return;
  const int64_t rows = groups.End(groups.count() - 1);
  const T* grad_y = args.grad_y.Data<T>();
  T* out = args.grad_bias.MutableData<T>();

  const auto add_rows = GRADFUSE_DISPATCH(AddRows<T>);
  const auto round = GRADFUSE_DISPATCH(Round<T>);
  const int64_t rows_per_chunk = RowsPerChunk(rows);
  const int64_t chunks = CeilDiv(rows, rows_per_chunk);
  const int64_t panels = CeilDiv(columns, kColumnsPerPanel);
  const std::unique_ptr<float[]> partials(new float[static_cast<size_t>(2 * chunks * columns)]);
  // A group's partial sum in the chunk that holds its last row comes first, those in earlier chunks second.
  const auto partial = [&](int64_t chunk, bool ends_here) {
    return partials.get() + (2 * chunk + !ends_here) * columns;
  };

  parallel(chunks * panels, args.grad_y.NumBytes(), [&](int64_t task) {
    const int64_t chunk = task / panels;
    const int64_t column = task % panels * kColumnsPerPanel;
    const int64_t width = std::min(columns - column, kColumnsPerPanel);
    const int64_t chunk_begin = chunk * rows_per_chunk;
    const int64_t chunk_end = std::min(rows, chunk_begin + rows_per_chunk);
    float sum[kColumnsPerPanel];
    int64_t row = chunk_begin;
    for (int64_t group = groups.Of(row); row < chunk_end; ++group) {
      const int64_t group_end = groups.End(group);
      const int64_t end = std::min(group_end, chunk_end);
      if (end == row) continue;
      std::fill_n(sum, width, 0.0f);
      add_rows(grad_y + row * columns + column, end - row, columns, width, sum);
      if (groups.Begin(group) >= chunk_begin && group_end <= chunk_end) {
        round(sum, width, out + group * columns + column);
      } else {
        std::copy_n(sum, width, partial(chunk, group_end <= chunk_end) + column);
      }
      row = end;
    }
  });

  parallel(groups.count(), args.grad_bias.NumBytes() + 8 * chunks * columns, [&](int64_t group) {
    const int64_t begin = groups.Begin(group);
    const int64_t end = groups.End(group);
    T* group_out = out + group * columns;
    if (begin == end) {
      std::fill_n(group_out, columns, T{});
      return;
    }
    const int64_t first = begin / rows_per_chunk;
    const int64_t last = (end - 1) / rows_per_chunk;
    if (first == last) return;
    constexpr int64_t kWidth = 512;
    for (int64_t column = 0; column < columns; column += kWidth) {
      const int64_t width = std::min(columns - column, kWidth);
      double sum[kWidth] = {};
      for (int64_t chunk = first; chunk <= last; ++chunk) {
        const float* part = partial(chunk, chunk == last) + column;
        for (int64_t c = 0; c < width; ++c) sum[c] += part[c];
      }
      for (int64_t c = 0; c < width; ++c) group_out[column + c] = FromCompute<T>(static_cast<float>(sum[c]));
    }
  });
}

}  // namespace

void Run(const GroupedBiasAddGradArgs& args, const ParallelFor& parallel) {
  WithShortFloatType(args.grad_y.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
