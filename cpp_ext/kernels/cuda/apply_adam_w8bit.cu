#include <cmath>

#include "gradfuse/ops/apply_adam_w8bit.h"
#include "kernels/apply_adam_w8bit.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

// A warp updates a block of elements, of which each thread has some neighbours.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kEach = static_cast<int>(ApplyAdamW8bitArgs::kBlock) / kWarp;

template <class T>
struct Params {
  AdamW8bitTensors<T> tensors;
  const float* learning_rate;
  const int64_t* step;
  const float* gradient_scale;  // or null
  AdamWScalars scalars;
  bool penalizes;
  bool aligned;
  int64_t total;
};

// A thread's elements from `index` on; those past the end are not read, and are 0.
template <class T>
__device__ void LoadEach(const T* data, int64_t index, int64_t total, bool aligned, T (&values)[kEach]) {
  constexpr int kVec = kWidest<T> < kEach ? kWidest<T> : kEach;
  if (aligned && index + kEach <= total) {
#pragma unroll
    for (int first = 0; first < kEach; first += kVec) {
      const auto pack = LoadOnce<Pack<T, kVec>>(data + index + first);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[first + i] = pack.values[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) values[i] = index + i < total ? data[index + i] : T{};
}

template <class T>
__device__ void StoreEach(T* data, int64_t index, int64_t total, bool aligned, const T (&values)[kEach]) {
  constexpr int kVec = kWidest<T> < kEach ? kWidest<T> : kEach;
  if (aligned && index + kEach <= total) {
#pragma unroll
    for (int first = 0; first < kEach; first += kVec) {
      Pack<T, kVec> pack;
#pragma unroll
      for (int i = 0; i < kVec; ++i) pack.values[i] = values[first + i];
      StoreOnce(data + index + first, pack);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (index + i < total) data[index + i] = values[i];
  }
}

__device__ float MaxOverWarp(float value) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float other = ShuffleXor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

template <class T>
__device__ void UpdateBlock(const Params<T>& params, const AdamWFactors& factors, int64_t block) {
  const AdamW8bitTensors<T>& tensors = params.tensors;
  const int64_t index = block * ApplyAdamW8bitArgs::kBlock + int64_t{threadIdx.x % kWarp} * kEach;
  T parameters[kEach];
  T gradients[kEach];
  uint8_t mean_codes[kEach];
  uint8_t root_codes[kEach];
  LoadEach(tensors.parameter, index, params.total, params.aligned, parameters);
  LoadEach(tensors.gradient, index, params.total, params.aligned, gradients);
  LoadEach(tensors.exp_avg, index, params.total, params.aligned, mean_codes);
  LoadEach(tensors.exp_avg_sq, index, params.total, params.aligned, root_codes);
  const float mean_unit = tensors.exp_avg_scale[block] / kMeanUnits;
  const float root_unit = tensors.exp_avg_sq_scale[block] / kRootUnits;
  float means[kEach];
  float roots[kEach];
  float largest_mean = 0;
  float largest_root = 0;
  float nothing = 0;  // times 0, all is 0 but NaN and infinities
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float parameter = Widen(parameters[i]);
    float gradient = RoundedProduct(Widen(gradients[i]), factors.gradient_scale);
    if (params.penalizes) gradient = RoundedSum(gradient, RoundedProduct(parameter, factors.weight_decay));
    const auto signed_code = static_cast<float>(mean_codes[i] - kMeanZero);
    const auto root_code = static_cast<float>(root_codes[i] + 1);
    const float old_mean = signed_code * fabsf(signed_code) * mean_unit;
    const float old_root = root_code * root_code * root_unit;
    const bool there = index + i < params.total;
    const float mean =
        RoundedSum(RoundedProduct(old_mean, factors.beta1), RoundedProduct(gradient, factors.beta1_rest));
    const float square = RoundedSum(RoundedProduct(RoundedProduct(old_root, old_root), factors.beta2),
                                    RoundedProduct(RoundedProduct(gradient, factors.beta2_rest), gradient));
    const float root = sqrtf(square);
    const float denominator = RoundedSum(RoundedProduct(root, factors.root_factor), factors.epsilon);
    const float way = RoundedProduct(mean, factors.step_size) / denominator;
    parameters[i] = Narrow<T>(RoundedSum(RoundedProduct(parameter, factors.kept_share), -way));
    means[i] = there ? mean : 0.0F;
    roots[i] = there ? root : 0.0F;
    largest_mean = fmaxf(largest_mean, fabsf(means[i]));
    largest_root = fmaxf(largest_root, roots[i]);
    nothing += means[i] * 0.0F + roots[i] * 0.0F;
  }
  largest_mean = MaxOverWarp(largest_mean);
  largest_root = MaxOverWarp(largest_root);
  const bool finite = SumOverLanes<kWarp>(nothing) == 0;
  const float mean_units = UnitsPerScale(kMeanUnits, largest_mean);
  const float root_units = UnitsPerScale(kRootUnits, largest_root);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float mean_root = rintf(sqrtf(fabsf(means[i]) * mean_units));
    // None is 0: where the gradient was small, the step would be far too long.
    const float root_root = fmaxf(rintf(sqrtf(roots[i] * root_units)), 1.0F);
    mean_codes[i] =
        static_cast<uint8_t>(finite ? kMeanZero + static_cast<int>(copysignf(mean_root, means[i])) : kMeanZero);
    root_codes[i] = static_cast<uint8_t>(finite ? static_cast<int>(root_root) - 1 : 0);
  }
  StoreEach(tensors.new_parameter, index, params.total, params.aligned, parameters);
  StoreEach(tensors.new_exp_avg, index, params.total, params.aligned, mean_codes);
  StoreEach(tensors.new_exp_avg_sq, index, params.total, params.aligned, root_codes);
  if (threadIdx.x % kWarp == 0) {
    tensors.new_exp_avg_scale[block] = finite ? largest_mean : NotANumber<float>();
    tensors.new_exp_avg_sq_scale[block] = finite ? largest_root : NotANumber<float>();
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) Update(const __grid_constant__ Params<T> params) {
  GRADFUSE_SHARED(AdamWFactors, factors, 1);
  if (threadIdx.x == 0) {
    const float scale = params.gradient_scale == nullptr ? 1.0F : *params.gradient_scale;
    *factors = params.scalars.At(*params.learning_rate, *params.step, scale);
  }
  Barrier();
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  for (int64_t block = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
       block * ApplyAdamW8bitArgs::kBlock < params.total; block += stride) {
    UpdateBlock(params, *factors, block);
  }
}

template <class T>
Status RunTyped(const ApplyAdamW8bitArgs& args, const Queue& queue) {
  bool aligned = true;
  for (const Tensor* tensor : {&args.parameter, &args.gradient, &args.exp_avg, &args.exp_avg_sq}) {
    aligned = aligned && IsAligned(tensor->data);
  }
  for (const MutableTensor* tensor : {&args.new_parameter, &args.new_exp_avg, &args.new_exp_avg_sq}) {
    aligned = aligned && IsAligned(tensor->data);
  }
  const Params<T> params{AdamW8bitTensors<T>(args),
                         args.learning_rate.Data<float>(),
                         args.step.Data<int64_t>(),
                         args.gradient_scale ? args.gradient_scale->Data<float>() : nullptr,
                         AdamWScalars(args),
                         Penalizes(args),
                         aligned,
                         args.parameter.NumElements()};
  const int64_t blocks = CeilDiv(params.total, ApplyAdamW8bitArgs::kBlock);
  return Launch(queue, Update<T>, CeilDiv(blocks, kWarps), kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const ApplyAdamW8bitArgs&) { return 0; }

Status Run(const ApplyAdamW8bitArgs& args, const Queue& queue) {
  return WithShortFloatType(args.parameter.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
