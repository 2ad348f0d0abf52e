#include "gradfuse/ops/convolution_backward.h"
#include "kernels/convolution_geometry.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;

// Each thread adds up one element of a result, in an order of its own that is always the same.
template <class T>
struct Params {
  ConvolutionGeometry g;
  const T* small;
  const T* large;
  const T* weight;
  T* out;
};

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

template <class T>
__global__ void __launch_bounds__(kThreads) GradWeight(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  const ConvolutionGeometry& g = params.g;
  const int64_t taps = g.kernel_size;
  const int64_t small_size = g.small_size;
  const int64_t large_size = g.large_size;
  const int64_t total = g.groups * g.small_channels * g.large_channels * taps;
  // A block adds up an element; threads take places in turns.
  for (int64_t index = blockIdx.x; index < total; index += gridDim.x) {
    const Position tap(index % taps, g.kernel);
    const int64_t filter = index / taps;
    const int64_t small_channel = filter / g.large_channels;
    const int64_t large_channel = small_channel / g.small_channels * g.large_channels + filter % g.large_channels;
    Real sum = 0;
    for (int64_t place = threadIdx.x; place < g.batch * small_size; place += kThreads) {
      const int64_t n = place / small_size;
      const int64_t window = place % small_size;
      int64_t element;
      if (!Meets(g, Position(window, g.small), tap, element)) continue;
      const T* small = params.small + (n * g.groups * g.small_channels + small_channel) * small_size;
      const T* large = params.large + (n * g.groups * g.large_channels + large_channel) * large_size;
      sum += Widen(small[window]) * Widen(large[element]);
    }
    sum = SumOverBlock<kThreads>(sum);
    if (threadIdx.x == 0) params.out[index] = Narrow<T>(sum);
  }
}

// Of a convolution: the gradient of the large side.
template <class T>
__global__ void __launch_bounds__(kThreads) GradLarge(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  const ConvolutionGeometry& g = params.g;
  const int64_t taps = g.kernel_size;
  const int64_t small_size = g.small_size;
  const int64_t large_size = g.large_size;
  const int64_t channels = g.groups * g.large_channels;
  const int64_t total = g.batch * channels * large_size;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < total; index += stride) {
    const Position element(index % large_size, g.large);
    const int64_t channel = index / large_size % channels;
    const int64_t n = index / large_size / channels;
    const int64_t first = channel / g.large_channels * g.small_channels;
    Real sum = 0;
    for (int64_t tap = 0; tap < taps; ++tap) {
      int64_t window;
      if (!IsMet(g, element, Position(tap, g.kernel), window)) continue;
      for (int64_t m = first; m < first + g.small_channels; ++m) {
        const T small = params.small[(n * g.groups * g.small_channels + m) * small_size + window];
        const T weight = params.weight[(m * g.large_channels + channel % g.large_channels) * taps + tap];
        sum += Widen(small) * Widen(weight);
      }
    }
    params.out[index] = Narrow<T>(sum);
  }
}

// Of a transposed convolution: the gradient of the small side.
template <class T>
__global__ void __launch_bounds__(kThreads) GradSmall(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  const ConvolutionGeometry& g = params.g;
  const int64_t taps = g.kernel_size;
  const int64_t small_size = g.small_size;
  const int64_t large_size = g.large_size;
  const int64_t channels = g.groups * g.small_channels;
  const int64_t total = g.batch * channels * small_size;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < total; index += stride) {
    const Position window(index % small_size, g.small);
    const int64_t channel = index / small_size % channels;
    const int64_t n = index / small_size / channels;
    const int64_t first = n * g.groups * g.large_channels + channel / g.small_channels * g.large_channels;
    Real sum = 0;
    for (int64_t tap = 0; tap < taps; ++tap) {
      int64_t element;
      if (!Meets(g, window, Position(tap, g.kernel), element)) continue;
      for (int64_t c = 0; c < g.large_channels; ++c) {
        const T large = params.large[(first + c) * large_size + element];
        sum += Widen(large) * Widen(params.weight[(channel * g.large_channels + c) * taps + tap]);
      }
    }
    params.out[index] = Narrow<T>(sum);
  }
}

// A block adds up the places of a channel.
template <class T>
__global__ void __launch_bounds__(kThreads)
    GradBias(const T* grad, int64_t batch, int64_t channels, int64_t size, T* out) {
  for (int64_t channel = blockIdx.x; channel < channels; channel += gridDim.x) {
    ComputeType<T> sum = 0;
    for (int64_t place = threadIdx.x; place < batch * size; place += kThreads) {
      sum += Widen(grad[(place / size * channels + channel) * size + place % size]);
    }
    sum = SumOverBlock<kThreads>(sum);
    if (threadIdx.x == 0) out[channel] = Narrow<T>(sum);
  }
}

template <class T>
Status RunTyped(const ConvolutionBackwardArgs& args, const Queue& queue) {
  const ConvolutionGeometry geometry(args);
  const bool transposed = args.transposed != 0;
  const T* const grad = args.grad_output.Data<T>();
  const T* const input = args.input.Data<T>();
  Params<T> params{geometry, transposed ? input : grad, transposed ? grad : input, args.weight.Data<T>(), nullptr};
  if (args.output_mask[0] != 0) {
    params.out = args.grad_input.MutableData<T>();
    const int64_t blocks = CeilDiv(args.grad_input.NumElements(), kThreads);
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, transposed ? GradSmall<T> : GradLarge<T>, blocks, kThreads, params));
  }
  if (args.output_mask[1] != 0) {
    params.out = args.grad_weight.MutableData<T>();
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, GradWeight<T>, args.grad_weight.NumElements(), kThreads, params));
  }
  if (args.output_mask[2] != 0) {
    const int64_t channels = args.grad_output.shape[1];
    const int64_t size = transposed ? geometry.large_size : geometry.small_size;
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, GradBias<T>, channels, kThreads, grad, geometry.batch, channels, size,
                                    args.grad_bias.MutableData<T>()));
  }
  return {};
}

}  // namespace

int64_t WorkspaceBytes(const ConvolutionBackwardArgs&) { return 0; }

Status Run(const ConvolutionBackwardArgs& args, const Queue& queue) {
  return WithFloatType(args.input.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
