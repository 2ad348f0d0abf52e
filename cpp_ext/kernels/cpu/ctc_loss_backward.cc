#include "gradfuse/ops/ctc_loss_backward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/ctc_labels.h"
#include "kernels/cpu/flush_subnormals.h"
#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/ctc_loss_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// The gradient needs the posterior gamma_t(s) of each state s at each step t, given the labels. With the forward pass's
// alpha it needs no backward recursion over beta: alpha says how the probability of state s' at step t + 1 divides
// among its predecessors p in {s', s' - 1, s' - 2}, and gamma flows back along the same division:
//   gamma_t(p) = sum over s' of gamma_{t+1}(s') exp(alpha_t(p)) / sum over predecessors p' of s' of exp(alpha_t(p'))
//
// Divides the posterior gamma of step t + 1 among the predecessors of each state: stay (s' itself), next (s' - 1) and
// jump (s' - 2). alpha is that of step t; alpha[-1] and alpha[-2] are -inf.
template <class Real>
void Divide(const Real* gamma, const Real* alpha, const Real* skip, int64_t states, Real* stay, Real* next,
            Real* jump) {
  const TagOf<Real> d;
  using V = hn::Vec<TagOf<Real>>;
  constexpr int kVectors = kSideBySide<TagOf<Real>>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto never = hn::Set(d, -std::numeric_limits<Real>::infinity());
  for (int64_t first = 0; first < states; first += kVectors * lanes) {
    V exp_a[kVectors], exp_b[kVectors], exp_c[kVectors], largest[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      const int64_t s = first + k * lanes;
      const auto a = hn::LoadU(d, alpha + s);
      const auto b = hn::LoadU(d, alpha + s - 1);
      const auto c = hn::LoadU(d, alpha + s - 2) + hn::LoadU(d, skip + s);
      largest[k] = hn::Max(c, hn::Max(a, b));
      const auto base = hn::IfThenZeroElse(largest[k] == never, largest[k]);
      exp_a[k] = Exp<Real, Of::kNotPositive>(d, a - base);
      exp_b[k] = Exp<Real, Of::kNotPositive>(d, b - base);
      exp_c[k] = Exp<Real, Of::kNotPositive>(d, c - base);
    }
    for (int k = 0; k < kVectors; ++k) {
      const int64_t s = first + k * lanes;
      // Where nothing flows the share is of no matter, and may be NaN.
      const auto given = hn::LoadU(d, gamma + s);
      const auto share = given * Reciprocal(d, exp_a[k] + exp_b[k] + exp_c[k]);
      const auto nothing = hn::Or(given == hn::Zero(d), largest[k] == never);
      hn::StoreU(hn::IfThenZeroElse(nothing, share * exp_a[k]), d, stay + s);
      hn::StoreU(hn::IfThenZeroElse(nothing, share * exp_b[k]), d, next + s);
      hn::StoreU(hn::IfThenZeroElse(nothing, share * exp_c[k]), d, jump + s);
    }
  }
}

// gamma of step t from the divided one of step t + 1; next[states], jump[states] and jump[states + 1] are 0. Gives the
// sum over the blanks, which are the even states.
template <class Real>
Real Collect(const Real* stay, const Real* next, const Real* jump, int64_t states, Real* gamma) {
  const TagOf<Real> d;
  auto sum = hn::Zero(d);
  ForEachVector(d, states, [&](int64_t s, auto at) HWY_ATTR {
    const auto value = Load(at, d, stay + s) + Load(at, d, next + s + 1) + Load(at, d, jump + s + 2);
    Store(at, value, d, gamma + s);
    if (hn::MaxLanes(d) > 1 || s % 2 == 0) sum = sum + value;
  });
  return hn::ReduceSum(d, hn::OddEven(hn::Zero(d), sum));
}

// The gradient where no path goes: of all classes, before those that the item uses are mended. Asks for `next`, the row
// that comes next: it lies where the processor does not expect it.
template <class T>
void ExpRow(const T* log_probs, const T* next, ComputeType<T> grad_out, int64_t classes, T* out) {
  const TagOf<T> d;
  const auto factor = hn::Set(d, grad_out);
  ForEachVector(d, classes, [&](int64_t c, auto at) HWY_ATTR {
    Prefetch(d, next + c);
    Store(at, Exp<T>(d, Load(at, d, log_probs + c)) * factor, d, out + c);
  });
}

// The gradient of the classes that the item uses, from their log-probabilities; in place.
template <class Real>
void Mend(const Real* occupied, Real grad_out, int64_t count, Real* values) {
  const TagOf<Real> d;
  const auto factor = hn::Set(d, grad_out);
  ForEachVector(d, count, [&](int64_t i, auto at) HWY_ATTR {
    Store(at, (Exp<Real>(d, Load(at, d, values + i)) - Load(at, d, occupied + i)) * factor, d, values + i);
  });
}

template <class T>
void Widen(const T* from, const T* next, int64_t count, ComputeType<T>* to) {
  const TagOf<T> d;
  ForEachVector(d, count, [&](int64_t i, auto at) HWY_ATTR {
    Prefetch(d, next + i);
    Store(at, Load(at, d, from + i), d, to + i);
  });
}

// Copies around the caches.
void StreamBytesTo(const uint8_t* from, int64_t count, uint8_t* to) {
  const hn::ScalableTag<uint8_t> d;
  ForEachVectorInto<Streaming<Whole>>(
      to, d, count, [&](int64_t i, auto at) HWY_ATTR { Store(at, Load(at, d, from + i), d, to + i); });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// gamma of the last step: the paths that end in the last blank and those that end in the last label.
template <class Real>
void EndPosterior(const Real* alpha, int64_t states, Real* gamma) {
  std::fill_n(gamma, states, Real(0));
  const Real blank = alpha[states - 1];
  const Real label = alpha[states - 2];
  const Real largest = std::max(blank, label);
  if (largest == -std::numeric_limits<Real>::infinity()) return;
  const Real exp_blank = std::exp(blank - largest);
  const Real exp_label = std::exp(label - largest);
  gamma[states - 1] = exp_blank / (exp_blank + exp_label);
  if (states > 1) gamma[states - 2] = exp_label / (exp_blank + exp_label);
}

// The classes that an item uses, blank first, and which of them each of its labels is.
class UsedClasses {
 public:
  UsedClasses(const CtcLabels& labels, int64_t items, int64_t blank) : stride_(labels.longest() + 1) {
    classes_.resize(static_cast<size_t>(items * stride_));
    slots_.resize(static_cast<size_t>(items * stride_));
    counts_.resize(static_cast<size_t>(items));
    for (int64_t item = 0; item < items; ++item) Fill(labels.labels(item), labels.length(item), item, blank);
  }

  int64_t count(int64_t item) const { return counts_[static_cast<size_t>(item)]; }
  const int64_t* classes(int64_t item) const { return classes_.data() + item * stride_; }
  // Of each label, its class's place in classes(item).
  const int64_t* slots(int64_t item) const { return slots_.data() + item * stride_; }

 private:
  void Fill(const int64_t* labels, int64_t length, int64_t item, int64_t blank) {
    int64_t* classes = classes_.data() + item * stride_;
    classes[0] = blank;
    int64_t* end = std::copy_n(labels, length, classes + 1);
    std::sort(classes + 1, end);
    end = std::unique(classes + 1, end);
    end = std::remove(classes + 1, end, blank);
    counts_[static_cast<size_t>(item)] = end - classes;
    for (int64_t index = 0; index < length; ++index) {
      const bool is_blank = labels[index] == blank;
      const int64_t place = is_blank ? 0 : std::lower_bound(classes + 1, end, labels[index]) - classes;
      slots_[static_cast<size_t>(item * stride_ + index)] = place;
    }
  }

  int64_t stride_;
  std::vector<int64_t> classes_;
  std::vector<int64_t> slots_;
  std::vector<int64_t> counts_;
};

template <class T>
void RunTyped(const CtcLossBackwardArgs& args, const ParallelFor& parallel) {
  using Real = ComputeType<T>;
  constexpr Real kNever = -std::numeric_limits<Real>::infinity();
  const int64_t steps = args.log_probs.shape[0];
  const int64_t items = args.log_probs.shape[1];
  const int64_t classes = args.log_probs.shape[2];
  const int64_t width = args.log_alpha.shape[2];
  const T* log_probs = args.log_probs.Data<T>();
  const T* log_alpha = args.log_alpha.Data<T>();
  T* out = args.grad_input.MutableData<T>();
  const auto divide = GRADFUSE_DISPATCH(Divide<Real>);
  const auto collect = GRADFUSE_DISPATCH(Collect<Real>);
  const auto exp_row = GRADFUSE_DISPATCH(ExpRow<T>);
  const auto mend = GRADFUSE_DISPATCH(Mend<Real>);
  const auto widen = GRADFUSE_DISPATCH(Widen<T>);
  const auto stream_bytes_to = GRADFUSE_DISPATCH(StreamBytesTo);
  const CtcLabels labels(args.targets, args.target_lengths);
  const UsedClasses used(labels, items, args.blank);
  // Eight rows of states an item, where log_alpha has one a step.
  Scratch<Real> scratch(items, /*arrays=*/8, 2 * labels.longest() + 1);

  // Rows that are mended in places are made in the cache, and streamed from there.
  const bool streams = 2 * args.grad_input.NumBytes() + args.log_alpha.NumBytes() >= StreamBytes();
  Scratch<T> made_rows(streams ? items : 0, /*arrays=*/1, classes);

  constexpr int64_t kCostOfState = 64;  // about what a state's three exponentials take, in bytes moved
  const int64_t cost = 2 * args.grad_input.NumBytes() + items * steps * (2 * labels.longest() + 1) * kCostOfState;
  parallel(items, cost, [&](int64_t item) {
    const FlushSubnormals flush;
    const StreamFence fence(streams);
    const int64_t input_length = args.input_lengths.Data<int64_t>()[item];
    const Real grad_out = ToCompute(args.grad_out.Data<T>()[item]);
    const Real loss = ToCompute(args.neg_log_likelihood.Data<T>()[item]);
    const bool infeasible = loss == std::numeric_limits<Real>::infinity();
    const auto alpha_row = [&](int64_t t) { return log_alpha + (item * steps + t) * width; };
    const auto log_probs_row = [&](int64_t t) { return log_probs + (t * items + item) * classes; };
    const auto out_row = [&](int64_t t) { return out + (t * items + item) * classes; };

    const bool is_zero = infeasible && args.zero_infinity != 0;
    for (int64_t t = is_zero ? 0 : input_length; t < steps; ++t) {
      std::memset(static_cast<void*>(out_row(t)), 0, static_cast<size_t>(classes) * sizeof(T));
    }
    if (is_zero) return;
    if (!std::isfinite(loss)) {
      const T nan = FromCompute<T>(std::numeric_limits<Real>::quiet_NaN());
      for (int64_t t = 0; t < input_length; ++t) std::fill_n(out_row(t), classes, nan);
      return;
    }

    const int64_t length = labels.length(item);
    const int64_t states = 2 * length + 1;
    const int64_t used_count = used.count(item);
    const int64_t* used_classes = used.classes(item);
    const int64_t* slots = used.slots(item);
    Real* skip = scratch.Array(item, 0);
    Real* alpha = scratch.Array(item, 1);
    Real* gamma = scratch.Array(item, 2);
    Real* stay = scratch.Array(item, 3);
    Real* next = scratch.Array(item, 4);
    Real* jump = scratch.Array(item, 5);
    Real* occupied = scratch.Array(item, 6);  // the posterior of each used class
    Real* mended = scratch.Array(item, 7);    // the gradient of each used class
    FillSkip(labels.labels(item), length, skip);
    std::fill_n(alpha - 2, 2, kNever);
    std::fill_n(next + states, 1, Real(0));
    std::fill_n(jump + states, 2, Real(0));

    for (int64_t t = input_length - 1; t >= 0; --t) {
      const int64_t next_t = std::max<int64_t>(t - 1, 0);
      widen(alpha_row(t), alpha_row(next_t), states, alpha);
      std::fill_n(occupied, used_count, Real(0));
      if (t == input_length - 1) {
        EndPosterior(alpha, states, gamma);
        occupied[0] = gamma[states - 1];
      } else {
        divide(gamma, alpha, skip, states, stay, next, jump);
        occupied[0] = collect(stay, next, jump, states, gamma);
      }
      for (int64_t index = 0; index < length; ++index) occupied[slots[index]] += gamma[2 * index + 1];

      const T* row = log_probs_row(t);
      T* gradient = streams ? made_rows.Array(item, 0) : out_row(t);
      exp_row(row, log_probs_row(next_t), grad_out, classes, gradient);
      for (int64_t index = 0; index < used_count; ++index) mended[index] = ToCompute(row[used_classes[index]]);
      mend(occupied, grad_out, used_count, mended);
      for (int64_t index = 0; index < used_count; ++index) {
        gradient[used_classes[index]] = FromCompute<T>(mended[index]);
      }
      if (streams) {
        stream_bytes_to(reinterpret_cast<const uint8_t*>(gradient), classes * static_cast<int64_t>(sizeof(T)),
                        reinterpret_cast<uint8_t*>(out_row(t)));
      }
    }
  });
}

}  // namespace

void Run(const CtcLossBackwardArgs& args, const ParallelFor& parallel) {
  WithFloatType(args.log_probs.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
