#include "gradfuse/ops/layer_norm_backward.h"

#include <algorithm>
#include <memory>

#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"
#include "kernels/layer_norm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/layer_norm_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_LAYER_NORM_BACKWARD_SHARED
#define GRADFUSE_LAYER_NORM_BACKWARD_SHARED
namespace gradfuse::cpu {
namespace {

// Rows that lie one after the other.
template <class T>
struct GradRows {
  using Real = ComputeType<T>;

  const T* grad_output;
  const T* input;
  const T* weight;   // or null
  const Real* mean;  // or null
  const Real* rstd;
  T* grad_input;  // or null
  int64_t count;
  int64_t size;
};

// What a block of rows adds to the gradients of weight and bias: (size) each.
template <class Real>
struct WeightSums {
  Real* of_weight;  // or null, as is the other then
  Real* of_bias;
};

// Of a row, as sums over its elements.
struct RowSums {
  double grad = 0;
  double product = 0;  // with the input's distance from its mean
};

// How many elements are added up in the type of the computation, before they are in double.
constexpr int64_t kAddedInRow = 2048;
// Rows that are swept together, so that the sums for weight and bias are read and written once for all.
constexpr int kRowsTogether = 4;

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// Adds up columns begin, ..., end - 1 of kRows rows from `row` on.
template <int kRows, bool kWeighted, bool kSums, class T>
void AddColumns(const GradRows<T>& rows, int64_t row, int64_t begin, int64_t end,
                const WeightSums<ComputeType<T>>& into, RowSums* sums) {
  const TagOf<T> d;
  using V = hn::Vec<TagOf<T>>;
  const T* const grads = rows.grad_output + row * rows.size;
  const T* const inputs = rows.input + row * rows.size;
  V mean[kRows];
  V rstd[kRows];
  V grad_sum[kRows];
  V product_sum[kRows];
  for (int r = 0; r < kRows; ++r) {
    mean[r] = hn::Set(d, rows.mean != nullptr ? rows.mean[row + r] : 0);
    rstd[r] = hn::Set(d, rows.rstd[row + r]);
    grad_sum[r] = product_sum[r] = hn::Zero(d);
  }
  ForEachVector(d, end - begin, [&](int64_t index, auto at) HWY_ATTR {
    const int64_t i = begin + index;
    const auto weight = kWeighted ? Load(at, d, rows.weight + i) : hn::Set(d, 1);
    auto of_weight = hn::Zero(d);
    auto of_bias = hn::Zero(d);
    for (int r = 0; r < kRows; ++r) {
      const auto grad = Load(at, d, grads + r * rows.size + i);
      const auto product = grad * (Load(at, d, inputs + r * rows.size + i) - mean[r]);
      if constexpr (kSums) {
        of_weight = hn::MulAdd(product, rstd[r], of_weight);
        of_bias = of_bias + grad;
      }
      if constexpr (kWeighted) {
        grad_sum[r] = hn::MulAdd(grad, weight, grad_sum[r]);
        product_sum[r] = hn::MulAdd(product, weight, product_sum[r]);
      } else {
        grad_sum[r] = grad_sum[r] + grad;
        product_sum[r] = product_sum[r] + product;
      }
    }
    if constexpr (kSums) {
      Store(at, Load(at, d, into.of_weight + i) + of_weight, d, into.of_weight + i);
      Store(at, Load(at, d, into.of_bias + i) + of_bias, d, into.of_bias + i);
    }
  });
  for (int r = 0; r < kRows; ++r) {
    sums[r].grad += static_cast<double>(hn::ReduceSum(d, grad_sum[r]));
    sums[r].product += static_cast<double>(hn::ReduceSum(d, product_sum[r]));
  }
}

// grad_input = rstd (grad + offset + slope (input - mean)), grad with the weight: exactly 0 for a row of one element.
template <bool kWeighted, bool kStreams, class T>
void WriteRow(const GradRows<T>& rows, int64_t row, const RowSums& sums) {
  const TagOf<T> d;
  using Real = ComputeType<T>;
  const auto count = static_cast<double>(rows.size);
  const auto rstd = static_cast<double>(rows.rstd[row]);
  const auto mean = hn::Set(d, rows.mean != nullptr ? rows.mean[row] : 0);
  const auto scale = hn::Set(d, rows.rstd[row]);
  const auto slope = hn::Set(d, static_cast<Real>(-rstd * rstd * (sums.product / count)));
  const auto offset = hn::Set(d, rows.mean != nullptr ? static_cast<Real>(-sums.grad / count) : Real{0});
  const T* const grads = rows.grad_output + row * rows.size;
  const T* const inputs = rows.input + row * rows.size;
  T* const out = rows.grad_input + row * rows.size;
  ForEachVectorInto<Sink<kStreams, Whole>>(out, d, rows.size, [&](int64_t i, auto at) HWY_ATTR {
    auto grad = Load(at, d, grads + i);
    if constexpr (kWeighted) grad = grad * Load(at, d, rows.weight + i);
    const auto distance = Load(at, d, inputs + i) - mean;
    Store(at, scale * hn::MulAdd(slope, distance, grad + offset), d, out + i);
  });
}

template <int kRows, bool kWeighted, bool kSums, bool kStreams, class T>
void SomeRows(const GradRows<T>& rows, int64_t row, const WeightSums<ComputeType<T>>& into) {
  RowSums sums[kRows];
  for (int64_t begin = 0; begin < rows.size; begin += kAddedInRow) {
    const int64_t end = std::min(rows.size, begin + kAddedInRow);
    AddColumns<kRows, kWeighted, kSums>(rows, row, begin, end, into, sums);
  }
  if (rows.grad_input == nullptr) return;
  for (int r = 0; r < kRows; ++r) WriteRow<kWeighted, kStreams>(rows, row + r, sums[r]);
}

template <class T, bool kWeighted, bool kSums, bool kStreams>
void BackwardRows(const GradRows<T>& rows, const WeightSums<ComputeType<T>>& into) {
  int64_t row = 0;
  for (; row + kRowsTogether <= rows.count; row += kRowsTogether) {
    SomeRows<kRowsTogether, kWeighted, kSums, kStreams>(rows, row, into);
  }
  for (; row < rows.count; ++row) SomeRows<1, kWeighted, kSums, kStreams>(rows, row, into);
}

template <class T>
using RowsFunction = void (*)(const GradRows<T>&, const WeightSums<ComputeType<T>>&);

template <class T>
RowsFunction<T> RowsFunctionFor(bool weighted, bool sums, bool streams) {
  static constexpr RowsFunction<T> kFunctions[2][2][2] = {
      {{BackwardRows<T, false, false, false>, BackwardRows<T, false, false, true>},
       {BackwardRows<T, false, true, false>, BackwardRows<T, false, true, true>}},
      {{BackwardRows<T, true, false, false>, BackwardRows<T, true, false, true>},
       {BackwardRows<T, true, true, false>, BackwardRows<T, true, true, true>}}};
  return kFunctions[weighted][sums][streams];
}

// sums += the columns of rows that lie `stride` apart.
template <class Real>
void AddUp(const Real* rows, int64_t count, int64_t stride, int64_t columns, double* sums) {
  for (int64_t row = 0; row < count; ++row, rows += stride) {
    for (int64_t c = 0; c < columns; ++c) sums[c] += static_cast<double>(rows[c]);
  }
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// Rows go in blocks, each with sums for weight and bias: few enough that these are little beside the rows.
int64_t RowsPerBlock(const NormalizedRows& rows) {
  constexpr int64_t kBlocks = 64;
  constexpr int64_t kElements = 8192;
  constexpr int64_t kMost = 64;
  const int64_t wanted = std::max(CeilDiv(rows.count, kBlocks), CeilDiv(kElements, rows.size));
  const int64_t most = std::max(kMost, std::min<int64_t>(4 * kMost, CeilDiv(kElements, rows.size)));
  const int64_t found = std::min(wanted, most);
  return found < kRowsTogether ? found : CeilDiv(found, kRowsTogether) * kRowsTogether;
}

template <class T>
class Kernel {
 public:
  Kernel(const LayerNormBackwardArgs& args, const ParallelFor& parallel)
      : args_(args), parallel_(parallel), rows_(args.input.shape, args.axis) {}

  void Run() const {
    if (rows_.size == 0) return;
    const bool sums_wanted = args_.output_mask[1] != 0 || args_.output_mask[2] != 0;
    const bool input_wanted = args_.output_mask[0] != 0;
    if (rows_.count == 0 && !sums_wanted) return;
    const int64_t size = rows_.size;
    const int64_t rows_per_block = RowsPerBlock(rows_);
    const int64_t blocks = CeilDiv(rows_.count, rows_per_block);
    const std::unique_ptr<Real[]> partials(sums_wanted ? new Real[static_cast<size_t>(2 * blocks * size)] : nullptr);
    const int64_t bytes = (input_wanted ? 3 : 2) * args_.input.NumBytes();
    const bool streams = input_wanted && bytes >= StreamBytes() && args_.grad_input.data != args_.grad_output.data;
    const auto backward = GRADFUSE_DISPATCH(RowsFunctionFor<T>)(args_.weight.has_value(), sums_wanted, streams);
    parallel_(blocks, bytes, [&](int64_t block) {
      const StreamFence fence(streams);
      WeightSums<Real> into{nullptr, nullptr};
      if (sums_wanted) {
        into = {partials.get() + 2 * block * size, partials.get() + (2 * block + 1) * size};
        std::fill_n(into.of_weight, 2 * size, Real{0});
      }
      const int64_t first = block * rows_per_block;
      backward(Rows(first, std::min(rows_per_block, rows_.count - first)), into);
    });
    if (sums_wanted) AddBlocks(partials.get(), blocks);
  }

 private:
  using Real = ComputeType<T>;

  GradRows<T> Rows(int64_t first, int64_t count) const {
    const int64_t begin = first * rows_.size;
    return {args_.grad_output.Data<T>() + begin,
            args_.input.Data<T>() + begin,
            args_.weight ? args_.weight->Data<T>() : nullptr,
            args_.mean ? args_.mean->Data<Real>() + first : nullptr,
            args_.rstd.Data<Real>() + first,
            args_.output_mask[0] != 0 ? args_.grad_input.MutableData<T>() + begin : nullptr,
            count,
            rows_.size};
  }

  // Block by block in order, in double.
  void AddBlocks(const Real* partials, int64_t blocks) const {
    constexpr int64_t kWidth = 512;
    const int64_t size = rows_.size;
    const int64_t panels = CeilDiv(size, kWidth);
    const auto add_up = GRADFUSE_DISPATCH(AddUp<Real>);
    const auto bytes = 2 * blocks * size * static_cast<int64_t>(sizeof(Real));
    parallel_(2 * panels, bytes, [&](int64_t task) {
      const int64_t of_bias = task / panels;
      const MutableTensor& out = of_bias != 0 ? args_.grad_bias : args_.grad_weight;
      if (args_.output_mask[static_cast<size_t>(1 + of_bias)] == 0) return;
      const int64_t column = task % panels * kWidth;
      const int64_t width = std::min(kWidth, size - column);
      double sums[kWidth] = {};
      add_up(partials + of_bias * size + column, blocks, 2 * size, width, sums);
      for (int64_t c = 0; c < width; ++c) {
        out.MutableData<T>()[column + c] = FromCompute<T>(static_cast<Real>(sums[c]));
      }
    });
  }

  const LayerNormBackwardArgs& args_;
  const ParallelFor& parallel_;
  const NormalizedRows rows_;
};

}  // namespace

void Run(const LayerNormBackwardArgs& args, const ParallelFor& parallel) {
  WithFloatType(args.input.dtype, [&](auto type) { Kernel<decltype(type)>(args, parallel).Run(); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
