#include "gradfuse/ops/scaled_masked_softmax_backward.h"

#include <algorithm>

#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/scaled_masked_softmax_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// Of a part of a row; the sums of parts add up in double, so that the error does not grow with the row.
template <class T>
float DotPart(const T* grad, const T* y, int64_t count) {
  const TagOf<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  // Four sums, as an addition takes as long as four begin.
  auto sum0 = hn::Zero(d);
  auto sum1 = sum0;
  auto sum2 = sum0;
  auto sum3 = sum0;
  const auto add = [&](int64_t i, auto at, hn::Vec<TagOf<T>>& sum)
                       HWY_ATTR { sum = hn::MulAdd(Load(at, d, grad + i), Load(at, d, y + i), sum); };
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    add(i, Sweep(), sum0);
    add(i + lanes, Sweep(), sum1);
    add(i + 2 * lanes, Sweep(), sum2);
    add(i + 3 * lanes, Sweep(), sum3);
  }
  ForEachVector(d, count - i, [&](int64_t rest, auto at) HWY_ATTR { add(i + rest, at, sum0); });
  return hn::ReduceSum(d, (sum0 + sum1) + (sum2 + sum3));
}

template <class T>
float Dot(const T* grad, const T* y, int64_t count) {
  constexpr int64_t kPart = 2048;
  double sum = 0;
  for (int64_t i = 0; i < count; i += kPart) sum += DotPart(grad + i, y + i, std::min(kPart, count - i));
  return static_cast<float>(sum);
}

// Rows that lie one after the other, and as many of the mask; each is swept twice, the second time out of the cache.
template <class T, bool kStreams, bool kMasked>
void GradRows(const T* grad, const T* y, const uint8_t* mask, float scale, int64_t rows, int64_t size, T* out) {
  const TagOf<T> d;
  const auto scales = hn::Set(d, scale);
  for (int64_t begin = 0; begin < rows * size; begin += size) {
    const auto r = hn::Set(d, Dot(grad + begin, y + begin, size));
    ForEachVectorInto<Sink<kStreams, Whole>>(out + begin, d, size, [&](int64_t column, auto at) HWY_ATTR {
      const int64_t i = begin + column;
      Prefetch(d, grad + i + size);
      Prefetch(d, y + i + size);
      auto value = scales * Load(at, d, y + i) * (Load(at, d, grad + i) - r);
      if constexpr (kMasked) value = hn::IfThenZeroElse(LoadMask(at, d, mask + i), value);
      Store(at, value, d, out + i);
    });
  }
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T>
auto RowsFunctionFor(bool masked, bool streams) {
  if (masked) return streams ? GRADFUSE_DISPATCH(GradRows<T, true, true>) : GRADFUSE_DISPATCH(GradRows<T, false, true>);
  return streams ? GRADFUSE_DISPATCH(GradRows<T, true, false>) : GRADFUSE_DISPATCH(GradRows<T, false, false>);
}

template <class T>
void RunTyped(const ScaledMaskedSoftmaxBackwardArgs& args, const ParallelFor& parallel) {
  const Shape& shape = args.grad_output.shape;
  const int64_t heads = shape[1];
  const int64_t queries = shape[2];
  const int64_t size = shape[3];
  const int64_t rows = shape[0] * heads * queries;
  if (rows == 0 || size == 0) return;
  const T* grad_output = args.grad_output.Data<T>();
  const T* y = args.y.Data<T>();
  T* out = args.grad_input.MutableData<T>();
  const uint8_t* mask = args.mask ? args.mask->Data<uint8_t>() : nullptr;
  // 0 for a dimension along which one mask serves all.
  const int64_t mask_batch_stride = args.mask && args.mask->shape[0] != 1 ? args.mask->strides[0] : 0;
  const int64_t mask_head_stride = args.mask && args.mask->shape[1] != 1 ? args.mask->strides[1] : 0;

  const int64_t bytes = 3 * args.y.NumBytes();
  const bool streams = bytes >= StreamBytes() && out != grad_output;
  const auto grad_rows = RowsFunctionFor<T>(mask != nullptr, streams);

  constexpr int64_t kTask = 16384;
  const int64_t rows_per_task = std::max<int64_t>(1, kTask / size);
  parallel(CeilDiv(rows, rows_per_task), bytes, [&](int64_t task) {
    const StreamFence fence(streams);
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end;) {
      // Rows of one head, whose masks lie one after the other too.
      const int64_t query = row % queries;
      const int64_t count = std::min(end - row, queries - query);
      const int64_t plane = row / queries;
      const int64_t mask_begin = plane / heads * mask_batch_stride + plane % heads * mask_head_stride + query * size;
      grad_rows(grad_output + row * size, y + row * size, mask ? mask + mask_begin : nullptr, args.scale, count, size,
                out + row * size);
      row += count;
    }
  });
}

}  // namespace

void Run(const ScaledMaskedSoftmaxBackwardArgs& args, const ParallelFor& parallel) {
  WithShortFloatType(args.y.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
