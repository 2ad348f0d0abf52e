#include "gradfuse/ops/apply_adam_w.h"
#include "kernels/apply_adam_w.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;
// Vectors that a thread has in flight of each tensor.
constexpr int kUnroll = 2;

template <class T>
struct Params {
  AdamWTensors<T> tensors;
  const float* learning_rate;
  const int64_t* step;
  const float* gradient_scale;  // or null
  AdamWScalars scalars;
  bool penalizes;
  bool from_gradient;
  int64_t total;
};

// kVec neighbours from `index` on; those past the end are not read.
template <class T, int kVec>
__device__ Pack<T, kVec> LoadFrom(const T* data, int64_t index, int64_t total) {
  if (index + kVec <= total) return LoadOnce<Pack<T, kVec>>(data + index);
  Pack<T, kVec> pack{};
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (index + i < total) pack.values[i] = data[index + i];
  }
  return pack;
}

template <class T, int kVec>
__device__ void StoreTo(T* data, int64_t index, int64_t total, const Pack<T, kVec>& pack) {
  if (index + kVec <= total) {
    StoreOnce(data + index, pack);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (index + i < total) data[index + i] = pack.values[i];
  }
}

template <class T, int kVec>
struct Packs {
  Pack<T, kVec> parameter;
  Pack<T, kVec> gradient;
  Pack<T, kVec> exp_avg;
  Pack<T, kVec> exp_avg_sq;
};

// Elements in place: what was read becomes what is written.
template <class T, int kVec>
__device__ void UpdatePacks(const Params<T>& params, const AdamWFactors& factors, Packs<T, kVec>& packs) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float parameter = Widen(packs.parameter.values[i]);
    float gradient = Widen(packs.gradient.values[i]) * factors.gradient_scale;
    if (params.penalizes) gradient += parameter * factors.weight_decay;
    float mean = Widen(packs.exp_avg.values[i]);
    const float change = gradient - mean;
    mean = params.from_gradient ? gradient - change * factors.beta1 : mean + change * factors.beta1_rest;
    const float square = Widen(packs.exp_avg_sq.values[i]) * factors.beta2 + gradient * factors.beta2_rest * gradient;
    const float denominator = sqrtf(square) / factors.root_correction + factors.epsilon;
    packs.parameter.values[i] = Narrow<T>(parameter * factors.kept_share - mean * factors.step_size / denominator);
    packs.exp_avg.values[i] = Narrow<T>(mean);
    packs.exp_avg_sq.values[i] = Narrow<T>(square);
  }
}

template <class T, int kVec>
__global__ void __launch_bounds__(kThreads) Update(const __grid_constant__ Params<T> params) {
  constexpr int64_t kTile = int64_t{kThreads} * kUnroll * kVec;
  GRADFUSE_SHARED(AdamWFactors, factors, 1);
  const AdamWTensors<T>& tensors = params.tensors;
  for (int64_t tile = blockIdx.x; tile * kTile < params.total; tile += gridDim.x) {
    const int64_t first = tile * kTile + int64_t{threadIdx.x} * kVec;
    Packs<T, kVec> packs[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t index = first + u * kThreads * kVec;
      if (index >= params.total) break;
      packs[u].parameter = LoadFrom<T, kVec>(tensors.parameter, index, params.total);
      packs[u].gradient = LoadFrom<T, kVec>(tensors.gradient, index, params.total);
      packs[u].exp_avg = LoadFrom<T, kVec>(tensors.exp_avg, index, params.total);
      packs[u].exp_avg_sq = LoadFrom<T, kVec>(tensors.exp_avg_sq, index, params.total);
    }
    if (tile == blockIdx.x) {
      // Powers in float64 take long: one thread computes them while the first tile is on its way.
      if (threadIdx.x == 0) {
        const float scale = params.gradient_scale == nullptr ? 1.0F : *params.gradient_scale;
        *factors = params.scalars.At(*params.learning_rate, *params.step, scale);
      }
      Barrier();
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t index = first + u * kThreads * kVec;
      if (index >= params.total) break;
      UpdatePacks(params, *factors, packs[u]);
      StoreTo(tensors.new_parameter, index, params.total, packs[u].parameter);
      StoreTo(tensors.new_exp_avg, index, params.total, packs[u].exp_avg);
      StoreTo(tensors.new_exp_avg_sq, index, params.total, packs[u].exp_avg_sq);
    }
  }
}

template <class T, int kVec>
Status Start(const Params<T>& params, const Queue& queue) {
  constexpr int64_t kTile = int64_t{kThreads} * kUnroll * kVec;
  return Launch(queue, Update<T, kVec>, CeilDiv(params.total, kTile), kThreads, params);
}

template <class T>
Status RunTyped(const ApplyAdamWArgs& args, const Queue& queue) {
  const Params<T> params{AdamWTensors<T>(args),     args.learning_rate.Data<float>(),
                         args.step.Data<int64_t>(), args.gradient_scale ? args.gradient_scale->Data<float>() : nullptr,
                         AdamWScalars(args),        Penalizes(args),
                         FromGradient(args),        args.parameter.NumElements()};
  bool aligned = true;
  for (const Tensor* tensor : {&args.parameter, &args.gradient, &args.exp_avg, &args.exp_avg_sq}) {
    aligned = aligned && IsAligned(tensor->data);
  }
  for (const MutableTensor* tensor : {&args.new_parameter, &args.new_exp_avg, &args.new_exp_avg_sq}) {
    aligned = aligned && IsAligned(tensor->data);
  }
  return aligned ? Start<T, kWidest<T>>(params, queue) : Start<T, 1>(params, queue);
}

}  // namespace

int64_t WorkspaceBytes(const ApplyAdamWArgs&) { return 0; }

Status Run(const ApplyAdamWArgs& args, const Queue& queue) {
  return WithShortFloatType(args.parameter.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
