#include "gradfuse/ops/apply_adam_w8bit.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/apply_adam_w8bit.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/apply_adam_w8bit.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

using FloatTag = hn::ScalableTag<float>;
using IntTag = hn::Rebind<int32_t, FloatTag>;
using CodeTag = hn::Rebind<uint8_t, FloatTag>;

// Of few bytes a vector: a block's are asked for at once, by PrefetchCodes.
GRADFUSE_INLINE Whole ForCodes(Whole) { return {}; }
GRADFUSE_INLINE Part ForCodes(Part at) { return at; }

// Asks for the codes of a block that comes later in the sweep.
GRADFUSE_INLINE void PrefetchCodes(const uint8_t* codes) {
  constexpr int64_t kLine = 64;
  constexpr int64_t kAhead = Sweep::kAhead / sizeof(float);
  for (int64_t i = 0; i < ApplyAdamW8bitArgs::kBlock; i += kLine) Prefetch(FloatTag(), codes + kAhead + i);
}

// Zero in the lanes that are not there.
template <class V>
GRADFUSE_INLINE V OnlyThere(Whole, V value) {
  return value;
}
template <class V>
GRADFUSE_INLINE V OnlyThere(Part at, V value) {
  return hn::IfThenElseZero(hn::FirstN(FloatTag(), at.lanes), value);
}

// What a block's elements are before they become codes.
struct Moments {
  static constexpr int64_t kBlock = ApplyAdamW8bitArgs::kBlock;

  alignas(64) float means[kBlock];
  alignas(64) float roots[kBlock];
  float largest_mean;
  float largest_root;
  bool finite;
};

// Updates the parameters of a block. Products are rounded before they are added, as in the function body.
template <class T, bool kPenalizes>
void UpdateBlock(const AdamW8bitTensors<T>& tensors, const AdamWFactors& factors, int64_t size, Moments& moments) {
  const FloatTag d;
  const IntTag integers;
  const CodeTag bytes;
  const auto gradient_scale = hn::Set(d, factors.gradient_scale);
  const auto kept_share = hn::Set(d, factors.kept_share);
  const auto weight_decay = hn::Set(d, factors.weight_decay);
  const auto beta1 = hn::Set(d, factors.beta1);
  const auto beta1_rest = hn::Set(d, factors.beta1_rest);
  const auto beta2 = hn::Set(d, factors.beta2);
  const auto beta2_rest = hn::Set(d, factors.beta2_rest);
  const auto step_size = hn::Set(d, factors.step_size);
  const auto root_factor = hn::Set(d, factors.root_factor);
  const auto epsilon = hn::Set(d, factors.epsilon);
  const auto mean_unit = hn::Set(d, *tensors.exp_avg_scale / kMeanUnits);
  const auto root_unit = hn::Set(d, *tensors.exp_avg_sq_scale / kRootUnits);
  const auto zero = hn::Zero(d);
  const auto code_of_zero = hn::Set(integers, kMeanZero);
  const auto one = hn::Set(integers, 1);
  auto largest_mean = zero;
  auto largest_root = zero;
  auto nothing = zero;  // times 0, all is 0 but NaN and infinities
  PrefetchCodes(tensors.exp_avg);
  PrefetchCodes(tensors.exp_avg_sq);
  ForEachVector<Sweep>(d, size, [&](int64_t i, auto at) HWY_ATTR {
    const auto parameter = Load(at, d, tensors.parameter + i);
    auto gradient = Load(at, d, tensors.gradient + i) * gradient_scale;
    if constexpr (kPenalizes) gradient = gradient + parameter * weight_decay;
    const auto codes = ForCodes(at);
    const auto signed_code =
        hn::ConvertTo(d, hn::PromoteTo(integers, codes.LoadBits(bytes, tensors.exp_avg + i)) - code_of_zero);
    const auto root_code =
        hn::ConvertTo(d, hn::PromoteTo(integers, codes.LoadBits(bytes, tensors.exp_avg_sq + i)) + one);
    const auto old_mean = signed_code * hn::Abs(signed_code) * mean_unit;
    const auto old_root = root_code * root_code * root_unit;
    const auto mean = old_mean * beta1 + gradient * beta1_rest;
    const auto square = old_root * old_root * beta2 + gradient * beta2_rest * gradient;
    const auto root = hn::Sqrt(square);
    const auto denominator = root * root_factor + epsilon;
    Store(at, parameter * kept_share - mean * step_size / denominator, d, tensors.new_parameter + i);
    const auto there_mean = OnlyThere(at, mean);
    const auto there_root = OnlyThere(at, root);
    hn::StoreU(there_mean, d, moments.means + i);
    hn::StoreU(there_root, d, moments.roots + i);
    largest_mean = hn::Max(largest_mean, hn::Abs(there_mean));
    largest_root = hn::Max(largest_root, there_root);
    nothing = nothing + (there_mean * zero + there_root * zero);
  });
  moments.largest_mean = hn::ReduceMax(d, largest_mean);
  moments.largest_root = hn::ReduceMax(d, largest_root);
  moments.finite = hn::ReduceSum(d, nothing) == 0;
}

// Writes the codes and scales of a block.
template <class T>
void Quantize(const AdamW8bitTensors<T>& tensors, const Moments& moments, int64_t size) {
  if (!moments.finite) {
    *tensors.new_exp_avg_scale = *tensors.new_exp_avg_sq_scale = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(tensors.new_exp_avg, size, static_cast<uint8_t>(kMeanZero));
    std::fill_n(tensors.new_exp_avg_sq, size, uint8_t{0});
    return;
  }
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> bits;
  const CodeTag bytes;
  *tensors.new_exp_avg_scale = moments.largest_mean;
  *tensors.new_exp_avg_sq_scale = moments.largest_root;
  const auto mean_units = hn::Set(d, UnitsPerScale(kMeanUnits, moments.largest_mean));
  const auto root_units = hn::Set(d, UnitsPerScale(kRootUnits, moments.largest_root));
  // A sum with it has a whole number, the nearest, in its last bits.
  constexpr float kWhole = 0x1.8p23F;
  const auto whole = hn::Set(d, kWhole);
  const auto whole_from_zero = hn::Set(d, kWhole + kMeanZero);
  const auto least = hn::Set(d, 1.0F);
  const auto one = hn::Set(bits, 1);
  ForEachVector(d, size, [&](int64_t i, auto at) HWY_ATTR {
    const auto mean = hn::LoadU(d, moments.means + i);
    const auto root = hn::LoadU(d, moments.roots + i);
    const auto mean_root = hn::CopySign(hn::Sqrt(hn::Abs(mean) * mean_units), mean);
    const auto mean_code = hn::BitCast(bits, mean_root + whole_from_zero);
    // None is 0: where the gradient was small, the step would be far too long.
    const auto root_root = hn::Max(hn::Sqrt(root * root_units), least);
    const auto root_code = hn::BitCast(bits, root_root + whole) - one;
    at.StoreBits(hn::TruncateTo(bytes, mean_code), bytes, tensors.new_exp_avg + i);
    at.StoreBits(hn::TruncateTo(bytes, root_code), bytes, tensors.new_exp_avg_sq + i);
  });
}

template <class T, bool kPenalizes>
void Update(AdamW8bitTensors<T> tensors, const AdamWFactors& factors, int64_t count) {
  Moments moments{};
  for (int64_t rest = count; rest > 0; rest -= Moments::kBlock) {
    const int64_t size = std::min(rest, Moments::kBlock);
    UpdateBlock<T, kPenalizes>(tensors, factors, size, moments);
    Quantize(tensors, moments, size);
    tensors.Advance(1);
  }
}

template <class T>
using UpdateFunction = void (*)(AdamW8bitTensors<T>, const AdamWFactors&, int64_t);

template <class T>
UpdateFunction<T> UpdateFor(bool penalizes) {
  return penalizes ? Update<T, true> : Update<T, false>;
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T>
void RunTyped(const ApplyAdamW8bitArgs& args, const ParallelFor& parallel) {
  constexpr int64_t kTask = 128;  // blocks
  constexpr int64_t kElements = kTask * ApplyAdamW8bitArgs::kBlock;
  const int64_t total = args.parameter.NumElements();
  const int64_t cost = 3 * args.parameter.NumBytes() + 4 * args.exp_avg.NumBytes();
  const float scale = args.gradient_scale ? *args.gradient_scale->Data<float>() : 1.0F;
  const AdamWFactors factors =
      AdamWScalars(args).At(*args.learning_rate.Data<float>(), *args.step.Data<int64_t>(), scale);
  const auto update = GRADFUSE_DISPATCH(UpdateFor<T>)(Penalizes(args));
  parallel(CeilDiv(total, kElements), cost, [&](int64_t task) {
    AdamW8bitTensors<T> tensors(args);
    tensors.Advance(task * kTask);
    update(tensors, factors, std::min(kElements, total - task * kElements));
  });
}

}  // namespace

void Run(const ApplyAdamW8bitArgs& args, const ParallelFor& parallel) {
  if (args.parameter.NumElements() == 0) return;
  WithShortFloatType(args.parameter.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
