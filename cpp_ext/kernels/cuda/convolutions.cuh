#pragma once

#include <type_traits>

#include "kernels/convolution_geometry.h"
#include "kernels/cuda/device.cuh"

// The sums that the operators on convolutions share.
namespace gradfuse::cuda {

inline constexpr int kConvolutionThreads = 256;

// Each thread adds up one element of a result, in an order of its own that is always the same.
template <class A, class T>
struct ConvolutionParams {
  ConvolutionGeometry g;
  const A* small;
  const A* large;
  const T* weight;
  A* out;                   // of the convolutions
  T* grad_weight;           // of what is summed over both sides
  const T* bias = nullptr;  // of each channel of the result
  bool relu = false;
  bool rounds = false;  // what is multiplied to bfloat16
};

// A number as it is multiplied.
template <class T>
__device__ ComputeType<T> FactorOf(bool rounds, T number) {
  if constexpr (!std::is_same_v<T, double>) {
    if (rounds) return Widen(Narrow<BFloat16>(Widen(number)));
  }
  return Widen(number);
}

// Where element `place` of a plane of sizes[0] x sizes[1] x sizes[2] is in space.
struct Position {
  __device__ Position(int64_t place, const int64_t (&sizes)[3]) {
    at[2] = place % sizes[2];
    at[1] = place / sizes[2] % sizes[1];
    at[0] = place / sizes[2] / sizes[1];
  }

  int64_t at[3];
};

__device__ inline int64_t IndexOf(const int64_t (&at)[3], const int64_t (&sizes)[3]) {
  return (at[0] * sizes[1] + at[1]) * sizes[2] + at[2];
}

// The element of the large side that a window meets with a place of the kernel; whether there is one.
__device__ inline bool Meets(const ConvolutionGeometry& g, const Position& window, const Position& tap,
                             int64_t& element) {
  int64_t at[3];
  for (int axis = 0; axis < 3; ++axis) {
    at[axis] = window.at[axis] * g.stride[axis] - g.padding[axis] + tap.at[axis] * g.dilation[axis];
    if (at[axis] < 0 || at[axis] >= g.large[axis]) return false;
  }
  element = IndexOf(at, g.large);
  return true;
}

// The window that meets an element of the large side with a place of the kernel; whether there is one.
__device__ inline bool IsMet(const ConvolutionGeometry& g, const Position& element, const Position& tap,
                             int64_t& window) {
  int64_t at[3];
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t distance = element.at[axis] + g.padding[axis] - tap.at[axis] * g.dilation[axis];
    if (distance < 0 || distance % g.stride[axis] != 0) return false;
    at[axis] = distance / g.stride[axis];
    if (at[axis] >= g.small[axis]) return false;
  }
  window = IndexOf(at, g.small);
  return true;
}

// What is written for the sum of a channel.
template <class A, class T>
__device__ A Finished(const ConvolutionParams<A, T>& params, int64_t channel, ComputeType<A> sum) {
  if (params.bias != nullptr) sum += Widen(params.bias[channel]);
  // NaN stays.
  return Narrow<A>(params.relu && sum < 0 ? ComputeType<A>{0} : sum);
}

// The large side of the small one.
template <class A, class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    TransposedConvolution(const __grid_constant__ ConvolutionParams<A, T> params) {
  using Real = ComputeType<A>;
  const ConvolutionGeometry& g = params.g;
  const int64_t taps = g.kernel_size;
  const int64_t small_size = g.small_size;
  const int64_t large_size = g.large_size;
  const int64_t channels = g.groups * g.large_channels;
  const int64_t total = g.batch * channels * large_size;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kConvolutionThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kConvolutionThreads + threadIdx.x; index < total;
       index += stride) {
    const Position element(index % large_size, g.large);
    const int64_t channel = index / large_size % channels;
    const int64_t n = index / large_size / channels;
    const int64_t first = channel / g.large_channels * g.small_channels;
    Real sum = 0;
    for (int64_t tap = 0; tap < taps; ++tap) {
      int64_t window;
      if (!IsMet(g, element, Position(tap, g.kernel), window)) continue;
      for (int64_t m = first; m < first + g.small_channels; ++m) {
        const A small = params.small[(n * g.groups * g.small_channels + m) * small_size + window];
        const T weight = params.weight[(m * g.large_channels + channel % g.large_channels) * taps + tap];
        sum += FactorOf(params.rounds, small) * FactorOf(params.rounds, weight);
      }
    }
    params.out[index] = Finished(params, channel, sum);
  }
}

// The small side of the large one.
template <class A, class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    Convolution(const __grid_constant__ ConvolutionParams<A, T> params) {
  using Real = ComputeType<A>;
  const ConvolutionGeometry& g = params.g;
  const int64_t taps = g.kernel_size;
  const int64_t small_size = g.small_size;
  const int64_t large_size = g.large_size;
  const int64_t channels = g.groups * g.small_channels;
  const int64_t total = g.batch * channels * small_size;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kConvolutionThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kConvolutionThreads + threadIdx.x; index < total;
       index += stride) {
    const Position window(index % small_size, g.small);
    const int64_t channel = index / small_size % channels;
    const int64_t n = index / small_size / channels;
    const int64_t first = n * g.groups * g.large_channels + channel / g.small_channels * g.large_channels;
    Real sum = 0;
    for (int64_t tap = 0; tap < taps; ++tap) {
      int64_t element;
      if (!Meets(g, window, Position(tap, g.kernel), element)) continue;
      for (int64_t c = 0; c < g.large_channels; ++c) {
        const A large = params.large[(first + c) * large_size + element];
        const T weight = params.weight[(channel * g.large_channels + c) * taps + tap];
        sum += FactorOf(params.rounds, large) * FactorOf(params.rounds, weight);
      }
    }
    params.out[index] = Finished(params, channel, sum);
  }
}

}  // namespace gradfuse::cuda
