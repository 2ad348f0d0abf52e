#include "gradfuse/ops/mse_loss_backward.h"

#include <algorithm>

#include "gradfuse/loops.h"
#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/mse_loss_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// Neighbouring elements of an operand along a row: others, or all the same one.
template <bool kVaries, class T>
class Operand {
 public:
  explicit Operand(const T* row) : row_(row), first_(hn::Set(TagOf<T>(), ToCompute(*row))) {}

  template <class At>
  GRADFUSE_INLINE hn::Vec<TagOf<T>> Get(At at, int64_t index) const {
    if constexpr (kVaries) return Load(at, TagOf<T>(), row_ + index);
    return first_;
  }

 private:
  const T* row_;
  hn::Vec<TagOf<T>> first_;
};

template <class T, bool kStreams, bool kGradVaries, bool kSelfVaries, bool kTargetVaries>
void GradRow(const T* grad, const T* self, const T* target, float factor, int64_t count, T* out) {
  const TagOf<T> d;
  const Operand<kGradVaries, T> grads(grad);
  const Operand<kSelfVaries, T> selves(self);
  const Operand<kTargetVaries, T> targets(target);
  const auto factors = hn::Set(d, factor);
  ForEachVectorInto<Sink<kStreams, Sweep>>(out, d, count, [&](int64_t i, auto at) HWY_ATTR {
    const auto difference = selves.Get(at, i) - targets.Get(at, i);
    Store(at, factors * difference * grads.Get(at, i), d, out + i);
  });
}

template <class T>
using RowFunction = void (*)(const T*, const T*, const T*, float, int64_t, T*);

template <class T, bool kStreams>
RowFunction<T> RowFunctionFor(bool grad_varies, bool self_varies, bool target_varies) {
  static constexpr RowFunction<T> kFunctions[2][2][2] = {
      {{GradRow<T, kStreams, false, false, false>, GradRow<T, kStreams, false, false, true>},
       {GradRow<T, kStreams, false, true, false>, GradRow<T, kStreams, false, true, true>}},
      {{GradRow<T, kStreams, true, false, false>, GradRow<T, kStreams, true, false, true>},
       {GradRow<T, kStreams, true, true, false>, GradRow<T, kStreams, true, true, true>}},
  };
  return kFunctions[grad_varies][self_varies][target_varies];
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

constexpr int kOperands = 3;  // grad_output, self, target

template <class T>
void RunTyped(const MseLossBackwardArgs& args, const ParallelFor& parallel) {
  const int64_t total = args.grad_input.NumElements();
  if (total == 0) return;
  const T* const grad = args.grad_output.Data<T>();
  const T* const self = args.self.Data<T>();
  const T* const target = args.target.Data<T>();
  T* const out = args.grad_input.MutableData<T>();
  const double divisor =
      args.reduction == MseLossBackwardArgs::kMean ? static_cast<double>(args.self.NumElements()) : 1;
  const auto factor = static_cast<float>(2 / divisor);

  // Operands are dense, so that along a row, the innermost loop, every stride is 0 or 1.
  const Loops<kOperands> loops(args.grad_input.shape, {&args.grad_output, &args.self, &args.target});
  const int row_axis = loops.inner();
  const int64_t row_size = loops.sizes[row_axis];
  const int64_t* row_strides = loops.strides[row_axis];
  const int64_t cost =
      args.grad_input.NumBytes() + args.grad_output.NumBytes() + args.self.NumBytes() + args.target.NumBytes();
  const bool streams = cost >= StreamBytes();
  const auto row_function =
      streams ? GRADFUSE_DISPATCH(RowFunctionFor<T, true>) : GRADFUSE_DISPATCH(RowFunctionFor<T, false>);
  const auto grad_row = row_function(row_strides[0] != 0, row_strides[1] != 0, row_strides[2] != 0);

  constexpr int64_t kTask = 32768;
  parallel(CeilDiv(total, kTask), cost, [&](int64_t task) {
    const StreamFence fence(streams);
    const int64_t begin = task * kTask;
    const int64_t end = std::min(total, begin + kTask);
    int64_t position[kMaxRank];
    int64_t offsets[kOperands] = {};
    int64_t rest = begin;
    for (int axis = row_axis; axis >= 0; --axis) {
      position[axis] = rest % loops.sizes[axis];
      rest /= loops.sizes[axis];
      for (int k = 0; k < kOperands; ++k) offsets[k] += position[axis] * loops.strides[axis][k];
    }
    for (int64_t at = begin; at < end;) {
      const int64_t count = std::min(end - at, row_size - position[row_axis]);
      grad_row(grad + offsets[0], self + offsets[1], target + offsets[2], factor, count, out + at);
      at += count;
      // On to the start of the next row.
      for (int k = 0; k < kOperands; ++k) offsets[k] -= position[row_axis] * row_strides[k];
      position[row_axis] = 0;
      for (int axis = row_axis - 1; axis >= 0; --axis) {
        for (int k = 0; k < kOperands; ++k) offsets[k] += loops.strides[axis][k];
        if (++position[axis] < loops.sizes[axis]) break;
        for (int k = 0; k < kOperands; ++k) offsets[k] -= loops.sizes[axis] * loops.strides[axis][k];
        position[axis] = 0;
      }
    }
  });
}

}  // namespace

void Run(const MseLossBackwardArgs& args, const ParallelFor& parallel) {
  WithShortFloatType(args.self.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
