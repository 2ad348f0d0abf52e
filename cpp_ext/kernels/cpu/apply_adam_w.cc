#include "gradfuse/ops/apply_adam_w.h"

#include <algorithm>

#include "kernels/apply_adam_w.h"
#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/apply_adam_w.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class T, bool kStreams, bool kPenalizes, bool kFromGradient>
void Update(const AdamWTensors<T>& tensors, const AdamWFactors& factors, int64_t count) {
  const TagOf<T> d;
  const auto gradient_scale = hn::Set(d, factors.gradient_scale);
  const auto kept_share = hn::Set(d, factors.kept_share);
  const auto weight_decay = hn::Set(d, factors.weight_decay);
  const auto beta1 = hn::Set(d, factors.beta1);
  const auto beta1_rest = hn::Set(d, factors.beta1_rest);
  const auto beta2 = hn::Set(d, factors.beta2);
  const auto beta2_rest = hn::Set(d, factors.beta2_rest);
  const auto step_size = hn::Set(d, factors.step_size);
  const auto root_correction = hn::Set(d, factors.root_correction);
  const auto epsilon = hn::Set(d, factors.epsilon);
  const AdamWTensors<T> at_first = tensors;
  ForEachVectorInto<Sink<kStreams, Sweep>>(at_first.new_parameter, d, count, [&](int64_t i, auto at) HWY_ATTR {
    const auto parameter = Load(at, d, at_first.parameter + i);
    auto gradient = Load(at, d, at_first.gradient + i) * gradient_scale;
    if constexpr (kPenalizes) gradient = hn::MulAdd(parameter, weight_decay, gradient);
    auto mean = Load(at, d, at_first.exp_avg + i);
    const auto change = gradient - mean;
    mean = kFromGradient ? hn::NegMulAdd(change, beta1, gradient) : hn::MulAdd(change, beta1_rest, mean);
    const auto square = hn::MulAdd(gradient * beta2_rest, gradient, Load(at, d, at_first.exp_avg_sq + i) * beta2);
    const auto denominator = hn::Sqrt(square) / root_correction + epsilon;
    Store(at, hn::MulSub(parameter, kept_share, mean * step_size / denominator), d, at_first.new_parameter + i);
    Store(at, mean, d, at_first.new_exp_avg + i);
    Store(at, square, d, at_first.new_exp_avg_sq + i);
  });
}

template <class T>
using UpdateFunction = void (*)(const AdamWTensors<T>&, const AdamWFactors&, int64_t);

template <class T>
UpdateFunction<T> UpdateFor(bool streams, bool penalizes, bool from_gradient) {
  static constexpr UpdateFunction<T> kFunctions[2][2][2] = {
      {{Update<T, false, false, false>, Update<T, false, false, true>},
       {Update<T, false, true, false>, Update<T, false, true, true>}},
      {{Update<T, true, false, false>, Update<T, true, false, true>},
       {Update<T, true, true, false>, Update<T, true, true, true>}},
  };
  return kFunctions[streams][penalizes][from_gradient];
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// Whether all outputs are aligned where one is: streaming stores need it of each.
bool AlignedAlike(const ApplyAdamWArgs& args) {
  constexpr uintptr_t kWidestVector = 64;
  const auto place = [](const MutableTensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data); };
  const uintptr_t first = place(args.new_parameter);
  return (place(args.new_exp_avg) - first) % kWidestVector == 0 &&
         (place(args.new_exp_avg_sq) - first) % kWidestVector == 0;
}

template <class T>
void RunTyped(const ApplyAdamWArgs& args, const ParallelFor& parallel) {
  constexpr int kTensors = 7;
  const int64_t total = args.parameter.NumElements();
  const int64_t cost = kTensors * args.parameter.NumBytes();
  const bool in_place = args.new_parameter.data == args.parameter.data;
  const bool streams = cost >= StreamBytes() && !in_place && AlignedAlike(args);
  const float scale = args.gradient_scale ? *args.gradient_scale->Data<float>() : 1.0F;
  const AdamWFactors factors =
      AdamWScalars(args).At(*args.learning_rate.Data<float>(), *args.step.Data<int64_t>(), scale);
  const auto update = GRADFUSE_DISPATCH(UpdateFor<T>)(streams, Penalizes(args), FromGradient(args));
  constexpr int64_t kTask = 32768;
  parallel(CeilDiv(total, kTask), cost, [&](int64_t task) {
    const StreamFence fence(streams);
    AdamWTensors<T> tensors(args);
    tensors.Advance(task * kTask);
    update(tensors, factors, std::min(kTask, total - task * kTask));
  });
}

}  // namespace

void Run(const ApplyAdamWArgs& args, const ParallelFor& parallel) {
  if (args.parameter.NumElements() == 0) return;
  WithShortFloatType(args.parameter.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
