#include "gradfuse/ops/square_grad.h"

#include <algorithm>

#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/square_grad.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class T>
void Gradients(const T* grad, const T* x, float factor, int64_t count, T* out) {
  const TagOf<T> d;
  const auto factors = hn::Set(d, factor);
  ForEachVector(d, count, [&](int64_t i, auto at) HWY_ATTR {
    Store(at, factors * Load(at, d, x + i) * Load(at, d, grad + i), d, out + i);
  });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T>
void RunTyped(const SquareGradArgs& args, const ParallelFor& parallel) {
  const T* const grad = args.grad.Data<T>();
  const T* const x = args.x.Data<T>();
  T* const out = args.grad_x.MutableData<T>();
  const int64_t total = args.x.NumElements();
  const auto gradients = GRADFUSE_DISPATCH(Gradients<T>);
  constexpr int64_t kTask = 32768;
  parallel(CeilDiv(total, kTask), 3 * args.x.NumBytes(), [&](int64_t task) {
    const int64_t begin = task * kTask;
    gradients(grad + begin, x + begin, args.factor, std::min(kTask, total - begin), out + begin);
  });
}

}  // namespace

void Run(const SquareGradArgs& args, const ParallelFor& parallel) {
  if (args.x.NumElements() == 0) return;
  WithShortFloatType(args.x.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
