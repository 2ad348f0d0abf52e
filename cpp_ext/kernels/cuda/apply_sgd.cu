#include "gradfuse/ops/apply_sgd.h"
#include "kernels/apply_sgd.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Params {
  SgdTensors<T> tensors;
  const float* learning_rate;
  const float* gradient_scale;  // or null
  float momentum;
  float weight_decay;
  SgdMomentum kind;
  int64_t total;
};

template <class T>
__device__ void UpdateElement(const Params<T>& params, float learning_rate, float gradient_scale, float parameter,
                              float gradient, float buffer, float* new_parameter, float* new_buffer) {
  float direction = gradient * gradient_scale;
  if (params.weight_decay != 0) direction += parameter * params.weight_decay;
  if (params.kind != SgdMomentum::kNone) {
    *new_buffer = buffer * params.momentum + direction;
    direction = params.kind == SgdMomentum::kNesterov ? direction + *new_buffer * params.momentum : *new_buffer;
  }
  *new_parameter = parameter - direction * learning_rate;
}

// Elements kVec at a time; fewer than kVec at the end one by one.
template <class T, int kVec>
__global__ void __launch_bounds__(kThreads) Update(const __grid_constant__ Params<T> params) {
  const SgdTensors<T>& tensors = params.tensors;
  const float learning_rate = *params.learning_rate;
  const float gradient_scale = params.gradient_scale == nullptr ? 1.0F : *params.gradient_scale;
  const bool has_momentum = params.kind != SgdMomentum::kNone;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kVec;
  for (int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec; first < params.total;
       first += stride) {
    if (first + kVec <= params.total) {
      Pack<T, kVec> parameter = LoadOnce<Pack<T, kVec>>(tensors.parameter + first);
      const Pack<T, kVec> gradient = LoadOnce<Pack<T, kVec>>(tensors.gradient + first);
      Pack<T, kVec> buffer{};
      if (has_momentum) buffer = LoadOnce<Pack<T, kVec>>(tensors.momentum_buffer + first);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        float new_parameter = 0;
        float new_buffer = 0;
        UpdateElement(params, learning_rate, gradient_scale, Widen(parameter.values[i]), Widen(gradient.values[i]),
                      Widen(buffer.values[i]), &new_parameter, &new_buffer);
        parameter.values[i] = Narrow<T>(new_parameter);
        buffer.values[i] = Narrow<T>(new_buffer);
      }
      StoreOnce(tensors.new_parameter + first, parameter);
      if (has_momentum) StoreOnce(tensors.new_momentum_buffer + first, buffer);
      continue;
    }
    for (int64_t i = first; i < params.total; ++i) {
      float new_parameter = 0;
      float new_buffer = 0;
      UpdateElement(params, learning_rate, gradient_scale, Widen(tensors.parameter[i]), Widen(tensors.gradient[i]),
                    has_momentum ? Widen(tensors.momentum_buffer[i]) : 0.0F, &new_parameter, &new_buffer);
      tensors.new_parameter[i] = Narrow<T>(new_parameter);
      if (has_momentum) tensors.new_momentum_buffer[i] = Narrow<T>(new_buffer);
    }
  }
}

template <class T, int kVec>
Status Start(const Params<T>& params, const Queue& queue) {
  return Launch(queue, Update<T, kVec>, CeilDiv(params.total, int64_t{kThreads} * kVec), kThreads, params);
}

template <class T>
Status RunTyped(const ApplySgdArgs& args, const Queue& queue) {
  const SgdTensors<T> tensors(args);
  const Params<T> params{tensors,
                         args.learning_rate.Data<float>(),
                         args.gradient_scale ? args.gradient_scale->Data<float>() : nullptr,
                         args.momentum,
                         args.weight_decay,
                         MomentumOf(args),
                         args.parameter.NumElements()};
  if (params.total == 0) return {};
  const bool aligned = IsAligned(tensors.parameter) && IsAligned(tensors.gradient) &&
                       IsAligned(tensors.momentum_buffer) && IsAligned(tensors.new_parameter) &&
                       IsAligned(tensors.new_momentum_buffer);
  return aligned ? Start<T, kWidest<T>>(params, queue) : Start<T, 1>(params, queue);
}

}  // namespace

int64_t WorkspaceBytes(const ApplySgdArgs&) { return 0; }

Status Run(const ApplySgdArgs& args, const Queue& queue) {
  return WithShortFloatType(args.parameter.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
