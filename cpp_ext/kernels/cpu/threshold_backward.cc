#include "gradfuse/ops/threshold_backward.h"

#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/threshold_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class T, bool kStreams>
void Gradients(const T* grad, const T* self, float threshold, int64_t count, T* out) {
  const TagOf<T> d;
  const auto most = hn::Set(d, static_cast<ComputeType<T>>(threshold));
  ForEachVectorInto<Sink<kStreams, Sweep>>(out, d, count, [&](int64_t i, auto at) HWY_ATTR {
    const auto is_cut = Load(at, d, self + i) <= most;
    Store(at, hn::IfThenZeroElse(is_cut, Load(at, d, grad + i)), d, out + i);
  });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T>
void RunTyped(const ThresholdBackwardArgs& args, const ParallelFor& parallel) {
  const T* const grad = args.grad_output.Data<T>();
  const T* const self = args.self.Data<T>();
  T* const out = args.grad_input.MutableData<T>();
  const auto gradients =
      Streams(args.self) ? GRADFUSE_DISPATCH(Gradients<T, true>) : GRADFUSE_DISPATCH(Gradients<T, false>);
  ForEachPart(args.self, parallel, [&](int64_t begin, int64_t count) {
    gradients(grad + begin, self + begin, args.threshold, count, out + begin);
  });
}

}  // namespace

void Run(const ThresholdBackwardArgs& args, const ParallelFor& parallel) {
  if (args.self.NumElements() == 0) return;
  WithFloatType(args.self.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
