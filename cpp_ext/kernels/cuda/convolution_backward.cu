#include "gradfuse/ops/convolution_backward.h"
#include "kernels/convolution_geometry.h"
#include "kernels/cuda/convolutions.cuh"

namespace gradfuse::cuda {
namespace {

template <class A, class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    GradWeight(const __grid_constant__ ConvolutionParams<A, T> params) {
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
    for (int64_t place = threadIdx.x; place < g.batch * small_size; place += kConvolutionThreads) {
      const int64_t n = place / small_size;
      const int64_t window = place % small_size;
      int64_t element;
      if (!Meets(g, Position(window, g.small), tap, element)) continue;
      const A* small = params.small + (n * g.groups * g.small_channels + small_channel) * small_size;
      const A* large = params.large + (n * g.groups * g.large_channels + large_channel) * large_size;
      sum += FactorOf(params.rounds, small[window]) * FactorOf(params.rounds, large[element]);
    }
    sum = SumOverBlock<kConvolutionThreads>(sum);
    if (threadIdx.x == 0) params.grad_weight[index] = Narrow<T>(sum);
  }
}

// A block adds up the places of a channel.
template <class A, class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    GradBias(const A* grad, int64_t batch, int64_t channels, int64_t size, T* out) {
  for (int64_t channel = blockIdx.x; channel < channels; channel += gridDim.x) {
    ComputeType<T> sum = 0;
    for (int64_t place = threadIdx.x; place < batch * size; place += kConvolutionThreads) {
      sum += Widen(grad[(place / size * channels + channel) * size + place % size]);
    }
    sum = SumOverBlock<kConvolutionThreads>(sum);
    if (threadIdx.x == 0) out[channel] = Narrow<T>(sum);
  }
}

template <class A, class T>
Status RunTyped(const ConvolutionBackwardArgs& args, const Queue& queue) {
  const ConvolutionGeometry geometry(args, args.input.shape, args.grad_output.shape);
  const bool transposed = args.transposed != 0;
  const A* const grad = args.grad_output.Data<A>();
  const A* const input = args.input.Data<A>();
  ConvolutionParams<A, T> params{geometry, transposed ? input : grad, transposed ? grad : input, args.weight.Data<T>(),
                                 nullptr};
  params.rounds = args.factors_in_bfloat16 != 0;
  if (args.output_mask[0] != 0) {
    params.out = args.grad_input.MutableData<A>();
    const int64_t blocks = CeilDiv(args.grad_input.NumElements(), kConvolutionThreads);
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, transposed ? Convolution<A, T> : TransposedConvolution<A, T>, blocks,
                                    kConvolutionThreads, params));
  }
  if (args.output_mask[1] != 0) {
    params.grad_weight = args.grad_weight.MutableData<T>();
    GRADFUSE_RETURN_IF_ERROR(
        Launch(queue, GradWeight<A, T>, args.grad_weight.NumElements(), kConvolutionThreads, params));
  }
  if (args.output_mask[2] != 0) {
    const int64_t channels = args.grad_output.shape[1];
    const int64_t size = transposed ? geometry.large_size : geometry.small_size;
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, GradBias<A, T>, channels, kConvolutionThreads, grad, geometry.batch,
                                    channels, size, args.grad_bias.MutableData<T>()));
  }
  return {};
}

}  // namespace

int64_t WorkspaceBytes(const ConvolutionBackwardArgs&) { return 0; }

Status Run(const ConvolutionBackwardArgs& args, const Queue& queue) {
  return WithActivationTypes<false>(args.input.dtype, args.weight.dtype,
                                    [&](auto a, auto t) { return RunTyped<decltype(a), decltype(t)>(args, queue); });
}

}  // namespace gradfuse::cuda
