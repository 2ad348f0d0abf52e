#include "gradfuse/ops/cross_entropy_loss_grad.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/flush_subnormals.h"
#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/cross_entropy.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cross_entropy_loss_grad.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// grad_input = exp(log_prob) scale - shift, with one shift for all classes. Precision is T, or float where the
// difference may be much smaller than its terms.
template <class T, bool kStreams, class Precision>
void GradRow(const T* log_prob, float scale, float shift, int64_t count, T* out) {
  const TagOf<T> d;
  const auto scales = hn::Set(d, scale);
  const auto shifts = hn::Set(d, shift);
  using At = Sink<kStreams, Sweep>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto store = [&](int64_t c, auto at, hn::Vec<TagOf<T>> grad) HWY_ATTR { Store(at, grad, d, out + c); };
  ForEachFourInto<At>(
      out, d, count,
      [&](int64_t c) HWY_ATTR {
        const auto x0 = Load(At(), d, log_prob + c);
        const auto x1 = Load(At(), d, log_prob + c + lanes);
        const auto x2 = Load(At(), d, log_prob + c + 2 * lanes);
        const auto x3 = Load(At(), d, log_prob + c + 3 * lanes);
        if (HWY_LIKELY(AreUsualLogProbs(d, x0, x1, x2, x3))) {
          store(c, At(), ScaledExpMinus<Precision, Of::kUsualLogProb>(d, scales, x0, shifts));
          store(c + lanes, At(), ScaledExpMinus<Precision, Of::kUsualLogProb>(d, scales, x1, shifts));
          store(c + 2 * lanes, At(), ScaledExpMinus<Precision, Of::kUsualLogProb>(d, scales, x2, shifts));
          store(c + 3 * lanes, At(), ScaledExpMinus<Precision, Of::kUsualLogProb>(d, scales, x3, shifts));
        } else {
          store(c, At(), ScaledExpMinus<Precision>(d, scales, x0, shifts));
          store(c + lanes, At(), ScaledExpMinus<Precision>(d, scales, x1, shifts));
          store(c + 2 * lanes, At(), ScaledExpMinus<Precision>(d, scales, x2, shifts));
          store(c + 3 * lanes, At(), ScaledExpMinus<Precision>(d, scales, x3, shifts));
        }
      },
      [&](int64_t c, auto at)
          HWY_ATTR { store(c, at, ScaledExpMinus<Precision>(d, scales, Load(at, d, log_prob + c), shifts)); });
}

// The same with a weight for each class.
template <class T, bool kStreams>
void WeightedGradRow(const T* log_prob, const float* weight, float scale, float shift, int64_t count, T* out) {
  const TagOf<T> d;
  const auto scales = hn::Set(d, scale);
  const auto shifts = hn::Set(d, shift);
  ForEachVectorInto<Sink<kStreams, Sweep>>(out, d, count, [&](int64_t c, auto at) HWY_ATTR {
    const auto scaled = Exp<float>(d, Load(at, d, log_prob + c)) * scales;
    Store(at, hn::NegMulAdd(shifts, Load(at, d, weight + c), scaled), d, out + c);
  });
}

template <class T, bool kStreams>
void ZeroRow(int64_t count, T* out) {
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
void RunTyped(const CrossEntropyLossGradArgs& args, const ParallelFor& parallel) {
  const int64_t rows = args.log_prob.shape[0];
  const int64_t classes = args.log_prob.shape[1];
  const T* grad_loss = args.grad_loss.Data<T>();
  const int64_t grad_stride = args.reduction == "none" ? 1 : 0;
  const T* log_prob = args.log_prob.Data<T>();
  const int64_t* target = args.target.Data<int64_t>();
  const float* weight = args.weight ? args.weight->Data<float>() : nullptr;
  T* out = args.grad_input.MutableData<T>();
  const CrossEntropyCoefficients coefficients = CoefficientsOf(args, classes, weight);
  const bool smooths = args.label_smoothing != 0;
  const int64_t bytes = 2 * args.log_prob.NumBytes();
  const bool streams = bytes >= StreamBytes() && out != log_prob;
  const auto grad_row = streams ? GRADFUSE_DISPATCH(GradRow<T, true, T>) : GRADFUSE_DISPATCH(GradRow<T, false, T>);
  const auto smoothed_grad_row =
      streams ? GRADFUSE_DISPATCH(GradRow<T, true, float>) : GRADFUSE_DISPATCH(GradRow<T, false, float>);
  const auto zero_row = streams ? GRADFUSE_DISPATCH(ZeroRow<T, true>) : GRADFUSE_DISPATCH(ZeroRow<T, false>);
  const auto weighted_grad_row =
      streams ? GRADFUSE_DISPATCH(WeightedGradRow<T, true>) : GRADFUSE_DISPATCH(WeightedGradRow<T, false>);

  // Classes [begin, end) of one row.
  const auto grad_part = [&](int64_t row, int64_t begin, int64_t end) {
    const T* part = log_prob + row * classes + begin;
    T* out_part = out + row * classes + begin;
    const int64_t label = target[row];
    if (label == args.ignore_index) {
      zero_row(end - begin, out_part);
      return;
    }
    const double g = ToCompute(grad_loss[row * grad_stride]);
    const double label_weight = weight ? weight[label] : 1;
    const double q = coefficients.target * g * label_weight;
    const double s = smooths ? coefficients.smoothing * g : 0;
    // A weight that is infinite matters to the rows of its class alone, unless it is smoothed over all.
    const auto scale = static_cast<float>(smooths ? q + s * coefficients.weight_sum : q);
    const auto shift = static_cast<float>(s);
    const bool has_label = label >= begin && label < end;
    // Read before the gradient may be written over it.
    const double x = has_label ? ToCompute(log_prob[row * classes + label]) : 0;
    if (weight && smooths) {
      weighted_grad_row(part, weight + begin, scale, shift, end - begin, out_part);
    } else {
      (smooths ? smoothed_grad_row : grad_row)(part, scale, shift, end - begin, out_part);
    }
    if (has_label) {
      // exp(log_prob) - 1 would cancel where the label is likely.
      double grad = q * std::expm1(x);
      if (smooths) grad += s * (std::exp(x) * coefficients.weight_sum - label_weight);
      out[row * classes + label] = FromCompute<T>(static_cast<float>(grad));
    }
  };

  // A task is some whole rows, or a part of one long row.
  constexpr int64_t kTask = 16384;
  const int64_t rows_per_task = std::max<int64_t>(1, kTask / classes);
  const int64_t parts = CeilDiv(classes, kTask);
  parallel(CeilDiv(rows, rows_per_task) * parts, bytes, [&](int64_t task) {
    const FlushSubnormals flush;
    const StreamFence fence(streams);
    const int64_t begin = task % parts * kTask;
    const int64_t first = task / parts * rows_per_task;
    for (int64_t row = first; row < std::min(rows, first + rows_per_task); ++row) {
      grad_part(row, begin, std::min(classes, begin + kTask));
    }
  });
}

}  // namespace

void Run(const CrossEntropyLossGradArgs& args, const ParallelFor& parallel) {
  WithShortFloatType(args.log_prob.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
