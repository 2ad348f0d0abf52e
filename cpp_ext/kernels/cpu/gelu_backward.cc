#include "gradfuse/ops/gelu_backward.h"

#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gelu_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// The slope of the unit at -size; at size it is 1 less this.
template <class D>
GRADFUSE_INLINE hn::Vec<D> SlopeBelow(D d, hn::Vec<D> size) {
  // P(-a) = e^(-a^2 / 2) R(a), with a polynomial of 1 / (1 + 0.35 a), fitted up to 14, in the place of R: wrong by at
  // most 3.2e-8 of it. One exponential is enough, and nothing cancels.
  const auto one = hn::Set(d, 1.0f);
  const auto place = Reciprocal(d, hn::MulAdd(size, hn::Set(d, 0.35f), one));
  const auto share =
      place * Polynomial(d, one, place, -2.91451421e-02f, 1.43968225e-01f, -2.55707800e-01f, 1.59167588e-01f,
                         -2.31058374e-02f, 1.05506524e-01f, 1.19833194e-01f, 1.39861837e-01f, 1.39621407e-01f);
  const auto bell = Exp<float, Of::kNotPositive>(d, size * size * hn::Set(d, -0.5f));
  return bell * hn::NegMulAdd(size, hn::Set(d, 0.398942280f), share);
}

// The same of the approximation by a hyperbolic tangent.
template <class D>
GRADFUSE_INLINE hn::Vec<D> TanhSlopeBelow(D d, hn::Vec<D> size) {
  const auto one = hn::Set(d, 1.0f);
  const auto square = size * size;
  const auto twice_scaled = size * hn::Set(d, 1.59576912f);
  // 0.5 (1 + tanh(-u)) is the logistic function of -2 u.
  const auto share = Sigmoid(d, hn::Zero(d) - twice_scaled * hn::MulAdd(square, hn::Set(d, 0.044715f), one));
  const auto inner_slope = twice_scaled * hn::MulAdd(square, hn::Set(d, 0.134145f), one);
  return share * hn::NegMulAdd(one - share, inner_slope, one);
}

// Further below slopes are less than 1e-36, and taken for 0.
template <bool kByTanh>
constexpr float kFarthest = kByTanh ? 9.9f : 13.1f;

template <class T, bool kStreams, bool kByTanh>
void Gradients(const T* grad, const T* self, int64_t count, T* out) {
  const TagOf<T> d;
  const auto one = hn::Set(d, 1.0f);
  ForEachVectorInto<Sink<kStreams, Sweep>>(out, d, count, [&](int64_t i, auto at) HWY_ATTR {
    const auto x = Load(at, d, self + i);
    const auto is_below = x < hn::Zero(d);
    const auto size = hn::IfThenElse(is_below, hn::Zero(d) - x, x);
    const auto any = kByTanh ? TanhSlopeBelow(d, size) : SlopeBelow(d, size);
    // NaN at infinity, where the formula has it.
    const auto below = hn::MulAdd(x, hn::Zero(d), hn::IfThenZeroElse(size > hn::Set(d, kFarthest<kByTanh>), any));
    const auto slope = hn::IfThenElse(is_below, below, one - below);
    Store(at, Load(at, d, grad + i) * slope, d, out + i);
  });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T, bool kByTanh>
void RunTyped(const GeluBackwardArgs& args, const ParallelFor& parallel) {
  const T* const grad = args.grad_output.Data<T>();
  const T* const self = args.self.Data<T>();
  T* const out = args.grad_input.MutableData<T>();
  const auto gradients = Streams(args.self) ? GRADFUSE_DISPATCH(Gradients<T, true, kByTanh>)
                                            : GRADFUSE_DISPATCH(Gradients<T, false, kByTanh>);
  ForEachPart(args.self, parallel,
              [&](int64_t begin, int64_t count) { gradients(grad + begin, self + begin, count, out + begin); });
}

}  // namespace

void Run(const GeluBackwardArgs& args, const ParallelFor& parallel) {
  if (args.self.NumElements() == 0) return;
  WithShortFloatType(args.self.dtype, [&](auto type) {
    using T = decltype(type);
    args.ByTanh() ? RunTyped<T, true>(args, parallel) : RunTyped<T, false>(args, parallel);
  });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
