#include "gradfuse/ops/batch_norm_backward.h"
#include "kernels/batch_norm.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAddedTogether = 64;  // terms that a thread adds up before they are in double

template <class A, class T>
struct Params {
  const A* grad_output;
  const A* input;
  const T* weight;  // or null
  const T* save_mean;
  const T* save_invstd;
  const A* relu_output;  // or null
  A* grad_input;         // these three: or null
  T* grad_weight;
  T* grad_bias;
  int64_t batch;
  int64_t channels;
  int64_t size;
  Divisor by_size;
  Divisor by_channels;
  // Workspace: grad_input = scale grad_output + (slope (input - mean) + offset), (C) each.
  ComputeType<T>* scale;
  ComputeType<T>* slope;
  ComputeType<T>* offset;
};

template <class A, class T>
__device__ ComputeType<T> Gradient(const Params<A, T>& params, int64_t index) {
  if (params.relu_output != nullptr && Widen(params.relu_output[index]) <= 0) return 0;
  return Widen(params.grad_output[index]);
}

// A block adds up a channel.
template <class A, class T>
__global__ void __launch_bounds__(kThreads) AddUp(const __grid_constant__ Params<A, T> params) {
  using Real = ComputeType<T>;
  const int64_t count = params.batch * params.size;
  for (int64_t channel = blockIdx.x; channel < params.channels; channel += gridDim.x) {
    const Real mean = Widen(params.save_mean[channel]);
    double grads = 0;
    double products = 0;
    for (int64_t begin = threadIdx.x; begin < count; begin += kAddedTogether * kThreads) {
      Real grad_sum = 0;
      Real product_sum = 0;
      for (int turn = 0; turn < kAddedTogether; ++turn) {
        const int64_t place = begin + turn * kThreads;
        if (place >= count) break;
        int64_t item;
        int64_t rest;
        params.by_size.Divide(place, item, rest);
        const int64_t index = (item * params.channels + channel) * params.size + rest;
        const Real grad = Gradient(params, index);
        grad_sum += grad;
        product_sum += grad * (Widen(params.input[index]) - mean);
      }
      grads += grad_sum;
      products += product_sum;
    }
    grads = SumOverBlock<kThreads>(grads);
    products = SumOverBlock<kThreads>(products);
    if (threadIdx.x != 0) continue;
    const double invstd = Widen(params.save_invstd[channel]);
    const double weight = params.weight != nullptr ? Widen(params.weight[channel]) : Real{1};
    if (params.grad_weight != nullptr) params.grad_weight[channel] = Narrow<T>(static_cast<Real>(products * invstd));
    if (params.grad_bias != nullptr) params.grad_bias[channel] = Narrow<T>(static_cast<Real>(grads));
    const double scale = weight * invstd;
    params.scale[channel] = static_cast<Real>(scale);
    params.slope[channel] = static_cast<Real>(-scale * invstd * invstd * (products / static_cast<double>(count)));
    params.offset[channel] = static_cast<Real>(-scale * (grads / static_cast<double>(count)));
  }
}

template <class A, class T>
__global__ void __launch_bounds__(kThreads) Write(const __grid_constant__ Params<A, T> params) {
  const int64_t total = params.batch * params.channels * params.size;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < total; index += stride) {
    int64_t plane;
    int64_t item;
    int64_t channel;
    params.by_size.Divide(index, plane, item);
    params.by_channels.Divide(plane, item, channel);
    const auto distance = Widen(params.input[index]) - Widen(params.save_mean[channel]);
    const auto rest = params.slope[channel] * distance + params.offset[channel];
    params.grad_input[index] = Narrow<A>(params.scale[channel] * Gradient(params, index) + rest);
  }
}

template <class A, class T>
Params<A, T> ParamsOf(const BatchNormBackwardArgs& args, Workspace& workspace) {
  const ChannelPlanes planes(args.input.shape);
  Params<A, T> params{};
  params.batch = planes.batch;
  params.channels = planes.channels;
  params.size = planes.size;
  params.grad_output = args.grad_output.Data<A>();
  params.input = args.input.Data<A>();
  params.weight = args.weight ? args.weight->Data<T>() : nullptr;
  params.save_mean = args.save_mean.Data<T>();
  params.save_invstd = args.save_invstd.Data<T>();
  params.relu_output = args.relu_output ? args.relu_output->Data<A>() : nullptr;
  params.grad_input = args.output_mask[0] != 0 ? args.grad_input.MutableData<A>() : nullptr;
  params.grad_weight = args.output_mask[1] != 0 ? args.grad_weight.MutableData<T>() : nullptr;
  params.grad_bias = args.output_mask[2] != 0 ? args.grad_bias.MutableData<T>() : nullptr;
  if (params.size > 0) params.by_size = Divisor(params.size);
  if (params.channels > 0) params.by_channels = Divisor(params.channels);
  params.scale = workspace.Array<ComputeType<T>>(params.channels);
  params.slope = workspace.Array<ComputeType<T>>(params.channels);
  params.offset = workspace.Array<ComputeType<T>>(params.channels);
  return params;
}

template <class A, class T>
Status RunTyped(const BatchNormBackwardArgs& args, const Queue& queue) {
  Workspace workspace(queue.workspace);
  const Params<A, T> params = ParamsOf<A, T>(args, workspace);
  if (params.channels == 0) return {};
  GRADFUSE_RETURN_IF_ERROR(Launch(queue, AddUp<A, T>, params.channels, kThreads, params));
  if (params.grad_input == nullptr) return {};
  const int64_t total = params.batch * params.channels * params.size;
  return Launch(queue, Write<A, T>, CeilDiv(total, kThreads), kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const BatchNormBackwardArgs& args) {
  Workspace workspace(nullptr);
  WithActivationTypes<false>(args.input.dtype, args.save_mean.dtype,
                             [&](auto a, auto t) { ParamsOf<decltype(a), decltype(t)>(args, workspace); });
  return workspace.bytes();
}

Status Run(const BatchNormBackwardArgs& args, const Queue& queue) {
  return WithActivationTypes<false>(args.input.dtype, args.save_mean.dtype,
                                    [&](auto a, auto t) { return RunTyped<decltype(a), decltype(t)>(args, queue); });
}

}  // namespace gradfuse::cuda
