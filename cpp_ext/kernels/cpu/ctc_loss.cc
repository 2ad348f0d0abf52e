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

// One step of the recursion for all states, and for what is after them up to whole vectors, which no state depends on.
// previous[-1] and previous[-2] are -inf.
template <class Real>
void AlphaStep(const Real* previous, const Real* skip, const Real* emitted, int64_t states, Real* alpha) {
  const TagOf<Real> d;
  using V = hn::Vec<TagOf<Real>>;
  constexpr int kVectors = kSideBySide<TagOf<Real>>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto never = hn::Set(d, -std::numeric_limits<Real>::infinity());
  for (int64_t first = 0; first < states; first += kVectors * lanes) {
    V stay[kVectors], next[kVectors], jump[kVectors], largest[kVectors], base[kVectors], sum[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      const int64_t s = first + k * lanes;
      stay[k] = hn::LoadU(d, previous + s);
      next[k] = hn::LoadU(d, previous + s - 1);
      jump[k] = hn::LoadU(d, previous + s - 2) + hn::LoadU(d, skip + s);
      largest[k] = hn::Max(jump[k], hn::Max(stay[k], next[k]));
      // Where nothing is possible, differences would be NaN: exp(-inf - 0) is the 0 that is wanted.
      base[k] = hn::IfThenZeroElse(largest[k] == never, largest[k]);
    }
    for (int k = 0; k < kVectors; ++k) {
      const auto exp = [&](V x) HWY_ATTR { return Exp<Real, Of::kNotPositive>(d, x - base[k]); };
      sum[k] = exp(stay[k]) + exp(next[k]) + exp(jump[k]);
    }
    for (int k = 0; k < kVectors; ++k) {
      const int64_t s = first + k * lanes;
      const auto impossible = hn::And(largest[k] == never, sum[k] == hn::Zero(d));
      const auto log_sum = hn::IfThenElse(impossible, never, base[k] + LogUpTo3(d, sum[k]));
      hn::StoreU(log_sum + hn::LoadU(d, emitted + s), d, alpha + s);
    }
  }
}

// row[index[s]] for all states.
template <class T>
void Pick(const T* row, const int32_t* index, int64_t states, ComputeType<T>* picked) {
  if constexpr (std::is_same_v<T, float>) {
    const TagOf<T> d;
    ForEachVector(d, states, [&](int64_t s, auto at) HWY_ATTR {
      const hn::Rebind<int32_t, TagOf<T>> i;
      Store(at, hn::GatherIndex(d, row, at.LoadBits(i, index + s)), d, picked + s);
    });
  } else {
    for (int64_t s = 0; s < states; ++s) picked[s] = ToCompute(row[index[s]]);
  }
}

template <class T>
void Round(const ComputeType<T>* alpha, int64_t states, T* out) {
  const TagOf<T> d;
  ForEachVector(d, states, [&](int64_t s, auto at) HWY_ATTR { Store(at, Load(at, d, alpha + s), d, out + s); });
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
  const auto alpha_step = GRADFUSE_DISPATCH(AlphaStep<Real>);
  const auto pick = GRADFUSE_DISPATCH(Pick<T>);
  const auto round = GRADFUSE_DISPATCH(Round<T>);
  const CtcLabels labels(args.targets, args.target_lengths);
  Scratch<Real> scratch(items, /*arrays=*/4, width);
  Scratch<int32_t> classes_of_states(items, /*arrays=*/1, width);

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
    Real* previous = scratch.Array(item, 2);
    Real* alpha = scratch.Array(item, 3);
    int32_t* state_class = classes_of_states.Array(item, 0);
    FillSkip(item_labels, length, skip);
    // A step before the first, from which the recursion enters states 0 and 1 alone.
    std::fill_n(previous - 2, states + 2, kNever);
    std::fill_n(alpha - 2, 2, kNever);
    previous[0] = 0;

    std::fill_n(state_class, states, static_cast<int32_t>(args.blank));
    for (int64_t k = 0; k < length; ++k) state_class[2 * k + 1] = static_cast<int32_t>(item_labels[k]);

    for (int64_t t = 0; t < input_length; ++t) {
      const T* row = log_probs + (t * items + item) * classes;
      pick(row, state_class, states, emitted);
      // Asks for what the next step picks, from places that the processor does not expect.
      const T* next = t + 1 < input_length ? row + items * classes : row;
      constexpr int64_t kLine = 64 / sizeof(T);
      if (classes <= length * kLine) {
        for (int64_t c = 0; c < classes; c += kLine) __builtin_prefetch(next + c);
      } else {
        __builtin_prefetch(next + args.blank);
        for (int64_t k = 0; k < length; ++k) __builtin_prefetch(next + item_labels[k]);
      }
      T* out = item_alpha + t * width;
      alpha_step(previous, skip, emitted, states, alpha);
      round(alpha, states, out);
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
