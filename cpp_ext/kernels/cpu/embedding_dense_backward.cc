#include "gradfuse/ops/embedding_dense_backward.h"

#include <algorithm>

#include "kernels/cpu/rows_by_index.h"
#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/embedding_dense_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_EMBEDDING_DENSE_BACKWARD_SHARED
#define GRADFUSE_EMBEDDING_DENSE_BACKWARD_SHARED
namespace gradfuse::cpu {
namespace {

constexpr int64_t kColumnsPerPanel = 512;

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// out = scale times the sum of some rows, of at most kColumnsPerPanel columns.
template <class T, bool kStreams>
void SumRows(const T* grad, int64_t stride, const int64_t* rows, int64_t count, float scale, int64_t columns, T* out) {
  const TagOf<T> d;
  float sum[kColumnsPerPanel];
  const T* first = grad + rows[0] * stride;
  ForEachVector(d, columns, [&](int64_t c, auto at) HWY_ATTR { Store(at, Load(at, d, first + c), d, sum + c); });
  for (int64_t i = 1; i < count; ++i) {
    const T* row = grad + rows[i] * stride;
    ForEachVector(d, columns, [&](int64_t c, auto at) HWY_ATTR {
      Store(at, Load(at, d, sum + c) + Load(at, d, row + c), d, sum + c);
    });
  }
  const auto scales = hn::Set(d, scale);
  ForEachVectorInto<Sink<kStreams, Whole>>(
      out, d, columns, [&](int64_t c, auto at) HWY_ATTR { Store(at, Load(at, d, sum + c) * scales, d, out + c); });
}

template <class T, bool kStreams>
void ZeroColumns(int64_t count, T* out) {
  const TagOf<T> d;
  ForEachVectorInto<Sink<kStreams, Whole>>(out, d, count,
                                           [&](int64_t c, auto at) HWY_ATTR { Store(at, hn::Zero(d), d, out + c); });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T>
void RunTyped(const EmbeddingDenseBackwardArgs& args, const ParallelFor& parallel) {
  const int64_t columns = args.grad_weight.shape[1];
  const int64_t indices = args.num_weights;
  if (columns == 0 || indices == 0) return;
  const T* grad = args.grad_output.Data<T>();
  T* out = args.grad_weight.MutableData<T>();
  const bool streams = args.grad_weight.NumBytes() >= StreamBytes();
  const auto sum_rows = streams ? GRADFUSE_DISPATCH(SumRows<T, true>) : GRADFUSE_DISPATCH(SumRows<T, false>);
  const auto zero = streams ? GRADFUSE_DISPATCH(ZeroColumns<T, true>) : GRADFUSE_DISPATCH(ZeroColumns<T, false>);
  const RowsByIndex by_index(args);

  // A task has some columns of some rows of the weight. A row that is looked up often is not cut but by its columns.
  constexpr int64_t kTask = 16384;
  const int64_t panels = CeilDiv(columns, kColumnsPerPanel);
  const int64_t rows_per_task = std::max<int64_t>(1, kTask / std::min(columns, kColumnsPerPanel));
  parallel(CeilDiv(indices, rows_per_task) * panels, args.grad_weight.NumBytes() + args.grad_output.NumBytes(),
           [&](int64_t task) {
             const StreamFence fence(streams);
             const int64_t column = task % panels * kColumnsPerPanel;
             const int64_t width = std::min(kColumnsPerPanel, columns - column);
             const int64_t first = task / panels * rows_per_task;
             for (int64_t index = first; index < std::min(indices, first + rows_per_task); ++index) {
               T* row = out + index * columns + column;
               const int64_t count = by_index.Count(index);
               if (count == 0) {
                 zero(width, row);
                 continue;
               }
               const float scale = args.scale_grad_by_freq != 0 ? 1.0F / static_cast<float>(count) : 1.0F;
               sum_rows(grad + column, columns, by_index.Rows(index), count, scale, width, row);
             }
           });
}

}  // namespace

void Run(const EmbeddingDenseBackwardArgs& args, const ParallelFor& parallel) {
  WithShortFloatType(args.grad_output.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
