#include "gradfuse/ops/ctc_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/ctc_labels.h"
#include "kernels/cpu/flush_subnormals.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/ctc_loss.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// One step of the recursion for all states; previous[-1] and previous[-2] are -inf.
template <class T>
void AlphaStep(const ComputeType<T>* previous, const ComputeType<T>* skip, const ComputeType<T>* emitted,
               int64_t states, ComputeType<T>* alpha, T* out) {
  using Real = ComputeType<T>;
  const TagOf<T> d;
  const auto never = hn::Set(d, -std::numeric_limits<Real>::infinity());
  ForEachVector(d, states, [&](int64_t s, auto at) HWY_ATTR {
    const auto stay = Load(at, d, previous + s);
    const auto next = Load(at, d, previous + s - 1);
    const auto jump = Load(at, d, previous + s - 2) + Load(at, d, skip + s);
    const auto largest = hn::Max(jump, hn::Max(stay, next));
    // Where nothing is possible, differences would be NaN: exp(-inf - 0) is the 0 that is wanted.
    const auto base = hn::IfThenZeroElse(largest == never, largest);
    const auto sum = Exp<Real>(d, stay - base) + Exp<Real>(d, next - base) + Exp<Real>(d, jump - base);
    const auto impossible = hn::And(largest == never, sum == hn::Zero(d));
    const auto log_sum = hn::IfThenElse(impossible, never, base + LogUpTo3(d, sum));
    const auto value = log_sum + Load(at, d, emitted + s);
    Store(at, value, d, alpha + s);
    Store(at, value, d, out + s);
  });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class Real>
Real LogSumExp(Real a, Real b) {
  const Real largest = std::max(a, b);
  if (largest == -std::numeric_limits<Real>::infinity()) return largest;
  return largest + std::log(std::exp(a - largest) + std::exp(b - largest));
}

template <class T>
void RunTyped(const CtcLossArgs& args, const ParallelFor& parallel) {
  using Real = ComputeType<T>;
  constexpr Real kNever = -std::numeric_limits<Real>::infinity();
  const int64_t steps = args.log_probs.shape[0];
  const int64_t items = args.log_probs.shape[1];
  const int64_t classes = args.log_probs.shape[2];
  const int64_t width = args.log_alpha.shape[2];
  const T* log_probs = args.log_probs.Data<T>();
  T* neg_log_likelihood = args.neg_log_likelihood.MutableData<T>();
  T* log_alpha = args.log_alpha.MutableData<T>();
  const auto alpha_step = GRADFUSE_DISPATCH(AlphaStep<T>);
  const CtcLabels labels(args.targets, args.target_lengths);
  Scratch<Real> scratch(items, /*arrays=*/4, width + 2);

  constexpr int64_t kCostOfState = 64;  // about what a state's three exponentials and a logarithm take, in bytes moved
  parallel(items, items * steps * width * kCostOfState, [&](int64_t item) {
    const FlushSubnormals flush;
    const int64_t length = labels.length(item);
    const int64_t states = 2 * length + 1;
    const int64_t input_length = args.input_lengths.Data<int64_t>()[item];
    const int64_t* item_labels = labels.labels(item);
    T* item_alpha = log_alpha + item * steps * width;
    Real* skip = scratch.Array(item, 0);
    Real* emitted = scratch.Array(item, 1);
    Real* previous = scratch.Array(item, 2) + 2;
    Real* alpha = scratch.Array(item, 3) + 2;
    FillSkip(item_labels, length, skip);
    // A step before the first, from which the recursion enters states 0 and 1 alone.
    std::fill_n(previous - 2, states + 2, kNever);
    std::fill_n(alpha - 2, 2, kNever);
    previous[0] = 0;

    for (int64_t t = 0; t < input_length; ++t) {
      const T* row = log_probs + (t * items + item) * classes;
      // Asks for what the next step picks, from places that the processor does not expect.
      const T* next = t + 1 < input_length ? row + items * classes : row;
      std::fill_n(emitted, states, ToCompute(row[args.blank]));
      __builtin_prefetch(next + args.blank);
      for (int64_t index = 0; index < length; ++index) {
        emitted[2 * index + 1] = ToCompute(row[item_labels[index]]);
        __builtin_prefetch(next + item_labels[index]);
      }
      T* out = item_alpha + t * width;
      alpha_step(previous, skip, emitted, states, alpha, out);
      std::fill_n(out + states, width - states, FromCompute<T>(kNever));
      std::swap(previous, alpha);
    }
    std::fill_n(item_alpha + input_length * width, (steps - input_length) * width, FromCompute<T>(kNever));

    // Without a step, previous is the one before the first: certain for an empty target, impossible for others.
    const Real last = previous[states - 1];
    const Real log_likelihood = input_length == 0 ? last : LogSumExp(last, previous[states - 2]);
    neg_log_likelihood[item] = FromCompute<T>(Real(0) - log_likelihood);
  });
}

}  // namespace

void Run(const CtcLossArgs& args, const ParallelFor& parallel) {
  WithFloatType(args.log_probs.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
