#include "gradfuse/ops/batch_norm.h"
#include "kernels/batch_norm.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAddedTogether = 64;  // terms that a thread adds up before they are in double

template <class A, class T>
struct Params {
  const A* input;
  const T* weight;  // these four: or null
  const T* bias;
  const T* running_mean;
  const T* running_var;
  float momentum;
  float eps;
  bool relu;
  A* output;
  T* save_mean;
  T* save_invstd;
  T* new_running_mean;
  T* new_running_var;
  int64_t batch;
  int64_t channels;
  int64_t size;
  Divisor by_size;
  Divisor by_channels;
  // Workspace: output = scale (input - mean) + offset, (C) each.
  float* mean;
  float* scale;
  float* offset;
};

// The sum over a channel of distances from a centre, or of their squares. All threads of the block call it.
template <bool kSquares, class A, class T>
__device__ double SumOfChannel(const Params<A, T>& params, int64_t channel, float centre) {
  const int64_t count = params.batch * params.size;
  double total = 0;
  for (int64_t begin = threadIdx.x; begin < count; begin += kAddedTogether * kThreads) {
    float sum = 0;
    for (int turn = 0; turn < kAddedTogether; ++turn) {
      const int64_t place = begin + turn * kThreads;
      if (place >= count) break;
      int64_t item;
      int64_t rest;
      params.by_size.Divide(place, item, rest);
      const float distance = Widen(params.input[(item * params.channels + channel) * params.size + rest]) - centre;
      sum += kSquares ? distance * distance : distance;
    }
    total += sum;
  }
  return SumOverBlock<kThreads>(total);
}

template <class T>
__device__ double ValueOf(const T* vector, int64_t channel, double otherwise) {
  return vector != nullptr ? static_cast<double>(Widen(vector[channel])) : otherwise;
}

// A block adds up a channel.
template <class A, class T>
__global__ void __launch_bounds__(kThreads) AddUp(const __grid_constant__ Params<A, T> params) {
  const auto count = static_cast<double>(params.batch * params.size);
  for (int64_t channel = blockIdx.x; channel < params.channels; channel += gridDim.x) {
    // A number that the channel lies around, as far as its first element tells.
    const float centre = count > 0 ? Widen(params.input[channel * params.size]) : 0.0F;
    const double mean = centre + SumOfChannel<false>(params, channel, centre) / count;
    const double squares = SumOfChannel<true>(params, channel, static_cast<float>(mean));
    if (threadIdx.x != 0) continue;
    const double invstd = 1.0 / sqrt(squares / count + static_cast<double>(params.eps));
    params.save_mean[channel] = Narrow<T>(static_cast<float>(mean));
    params.save_invstd[channel] = Narrow<T>(static_cast<float>(invstd));
    const double momentum = params.momentum;
    if (params.running_mean != nullptr) {
      const double updated = (1.0 - momentum) * Widen(params.running_mean[channel]) + momentum * mean;
      params.new_running_mean[channel] = Narrow<T>(static_cast<float>(updated));
    }
    if (params.running_var != nullptr) {
      const double unbiased = squares / (count - 1.0);
      const double updated = (1.0 - momentum) * Widen(params.running_var[channel]) + momentum * unbiased;
      params.new_running_var[channel] = Narrow<T>(static_cast<float>(updated));
    }
    params.mean[channel] = static_cast<float>(mean);
    params.scale[channel] = static_cast<float>(ValueOf(params.weight, channel, 1.0) * invstd);
    params.offset[channel] = static_cast<float>(ValueOf(params.bias, channel, 0.0));
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
    const float distance = Widen(params.input[index]) - params.mean[channel];
    const float value = params.scale[channel] * distance + params.offset[channel];
    params.output[index] = Narrow<A>(params.relu && value <= 0 ? 0.0F : value);
  }
}

template <class T>
const T* DataOf(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->Data<T>() : nullptr;
}

template <class A, class T>
Params<A, T> ParamsOf(const BatchNormArgs& args, Workspace& workspace) {
  const ChannelPlanes planes(args.input.shape);
  Params<A, T> params{};
  params.batch = planes.batch;
  params.channels = planes.channels;
  params.size = planes.size;
  params.input = args.input.Data<A>();
  params.weight = DataOf<T>(args.weight);
  params.bias = DataOf<T>(args.bias);
  params.running_mean = DataOf<T>(args.running_mean);
  params.running_var = DataOf<T>(args.running_var);
  params.momentum = args.momentum;
  params.eps = args.eps;
  params.relu = args.relu != 0;
  params.output = args.output.MutableData<A>();
  params.save_mean = args.save_mean.MutableData<T>();
  params.save_invstd = args.save_invstd.MutableData<T>();
  params.new_running_mean = args.new_running_mean.MutableData<T>();
  params.new_running_var = args.new_running_var.MutableData<T>();
  if (params.size > 0) params.by_size = Divisor(params.size);
  if (params.channels > 0) params.by_channels = Divisor(params.channels);
  params.mean = workspace.Array<float>(params.channels);
  params.scale = workspace.Array<float>(params.channels);
  params.offset = workspace.Array<float>(params.channels);
  return params;
}

template <class A, class T>
Status RunTyped(const BatchNormArgs& args, const Queue& queue) {
  Workspace workspace(queue.workspace);
  const Params<A, T> params = ParamsOf<A, T>(args, workspace);
  if (params.channels == 0) return {};
  GRADFUSE_RETURN_IF_ERROR(Launch(queue, AddUp<A, T>, params.channels, kThreads, params));
  const int64_t total = params.batch * params.channels * params.size;
  return Launch(queue, Write<A, T>, CeilDiv(total, kThreads), kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const BatchNormArgs& args) {
  Workspace workspace(nullptr);
  WithActivationTypes<true>(args.input.dtype, args.save_mean.dtype,
                            [&](auto a, auto t) { ParamsOf<decltype(a), decltype(t)>(args, workspace); });
  return workspace.bytes();
}

Status Run(const BatchNormArgs& args, const Queue& queue) {
  return WithActivationTypes<true>(args.input.dtype, args.save_mean.dtype,
                                   [&](auto a, auto t) { return RunTyped<decltype(a), decltype(t)>(args, queue); });
}

}  // namespace gradfuse::cuda
