#include "gradfuse/ops/apply_sgd.h"

#include <algorithm>

#include "kernels/apply_sgd.h"
#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/apply_sgd.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_APPLY_SGD_SHARED
#define GRADFUSE_APPLY_SGD_SHARED
namespace gradfuse::cpu {
namespace {

// What the loops multiply by.
struct SgdFactors {
  float learning_rate;
  float gradient_scale;
  float momentum;
  float weight_decay;
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class T, bool kStreams, bool kPenalizes, SgdMomentum kMomentum>
void Update(const SgdTensors<T>& tensors, const SgdFactors& factors, int64_t count) {
  const TagOf<T> d;
  const auto learning_rate = hn::Set(d, factors.learning_rate);
  const auto gradient_scale = hn::Set(d, factors.gradient_scale);
  const auto momentum = hn::Set(d, factors.momentum);
  const auto weight_decay = hn::Set(d, factors.weight_decay);
  const SgdTensors<T> at_first = tensors;
  ForEachVectorInto<Sink<kStreams, Sweep>>(at_first.new_parameter, d, count, [&](int64_t i, auto at) HWY_ATTR {
    const auto parameter = Load(at, d, at_first.parameter + i);
    auto direction = Load(at, d, at_first.gradient + i) * gradient_scale;
    if constexpr (kPenalizes) direction = hn::MulAdd(parameter, weight_decay, direction);
    if constexpr (kMomentum != SgdMomentum::kNone) {
      const auto buffer = hn::MulAdd(Load(at, d, at_first.momentum_buffer + i), momentum, direction);
      Store(at, buffer, d, at_first.new_momentum_buffer + i);
      direction = kMomentum == SgdMomentum::kNesterov ? hn::MulAdd(buffer, momentum, direction) : buffer;
    }
    Store(at, hn::NegMulAdd(direction, learning_rate, parameter), d, at_first.new_parameter + i);
  });
}

template <class T>
using UpdateFunction = void (*)(const SgdTensors<T>&, const SgdFactors&, int64_t);

template <class T, bool kStreams, bool kPenalizes>
UpdateFunction<T> UpdateWith(SgdMomentum momentum) {
  switch (momentum) {
    case SgdMomentum::kNone: return Update<T, kStreams, kPenalizes, SgdMomentum::kNone>;
    case SgdMomentum::kPlain: return Update<T, kStreams, kPenalizes, SgdMomentum::kPlain>;
    case SgdMomentum::kNesterov: break;
  }
  return Update<T, kStreams, kPenalizes, SgdMomentum::kNesterov>;
}

template <class T>
UpdateFunction<T> UpdateFor(bool streams, bool penalizes, SgdMomentum momentum) {
  if (streams) return penalizes ? UpdateWith<T, true, true>(momentum) : UpdateWith<T, true, false>(momentum);
  return penalizes ? UpdateWith<T, false, true>(momentum) : UpdateWith<T, false, false>(momentum);
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// Whether both outputs are aligned where one is: streaming stores need it of each.
bool AlignedAlike(const ApplySgdArgs& args) {
  constexpr uintptr_t kWidestVector = 64;
  if (!args.momentum_buffer) return true;
  const auto place = [](const MutableTensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data); };
  return (place(args.new_momentum_buffer) - place(args.new_parameter)) % kWidestVector == 0;
}

template <class T>
void RunTyped(const ApplySgdArgs& args, const ParallelFor& parallel) {
  const int64_t total = args.parameter.NumElements();
  const int64_t cost = (args.momentum_buffer ? 5 : 3) * args.parameter.NumBytes();
  const bool in_place = args.new_parameter.data == args.parameter.data;
  const bool streams = cost >= StreamBytes() && !in_place && AlignedAlike(args);
  const SgdFactors factors{*args.learning_rate.Data<float>(),
                           args.gradient_scale ? *args.gradient_scale->Data<float>() : 1.0F, args.momentum,
                           args.weight_decay};
  const auto update = GRADFUSE_DISPATCH(UpdateFor<T>)(streams, args.weight_decay != 0, MomentumOf(args));
  constexpr int64_t kTask = 32768;
  parallel(CeilDiv(total, kTask), cost, [&](int64_t task) {
    const StreamFence fence(streams);
    SgdTensors<T> tensors(args);
    tensors.Advance(task * kTask);
    update(tensors, factors, std::min(kTask, total - task * kTask));
  });
}

}  // namespace

void Run(const ApplySgdArgs& args, const ParallelFor& parallel) {
  if (args.parameter.NumElements() == 0) return;
  WithShortFloatType(args.parameter.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
