#include "gradfuse/ops/convolution_backward.h"

#include "kernels/convolution_geometry.h"
#include "kernels/cpu/convolution_products.h"
#include "kernels/dispatch.h"

namespace gradfuse::cpu {
namespace {

// Sums over the batch and the places of a channel.
template <class A, class T>
void GradBias(const A* grad, int64_t batch, int64_t channels, int64_t size, T* out, const ParallelFor& parallel) {
  parallel(channels, batch * channels * size * static_cast<int64_t>(sizeof(A)), [&](int64_t channel) {
    double sum = 0;
    for (int64_t n = 0; n < batch; ++n) {
      const A* from = grad + (n * channels + channel) * size;
      for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(ToCompute(from[i]));
    }
    out[channel] = FromCompute<T>(static_cast<ComputeType<T>>(sum));
  });
}

template <class A, class T>
void RunTyped(const ConvolutionBackwardArgs& args, const ParallelFor& parallel) {
  const ConvolutionGeometry geometry(args, args.input.shape, args.grad_output.shape);
  const bool transposed = args.transposed != 0;
  const ConvolutionProducts<A, T> products(args, geometry, parallel);
  const Tensor& grad = args.grad_output;
  if (args.output_mask[0] != 0) products.Convolve(transposed, grad, nullptr, false, args.grad_input);
  if (args.output_mask[1] != 0) {
    products.Correlate(transposed ? args.input : grad, transposed ? grad : args.input, args.grad_weight);
  }
  if (args.output_mask[2] != 0) {
    GradBias(grad.Data<A>(), geometry.batch, grad.shape[1], transposed ? geometry.large_size : geometry.small_size,
             args.grad_bias.MutableData<T>(), parallel);
  }
}

}  // namespace

void Run(const ConvolutionBackwardArgs& args, const ParallelFor& parallel) {
  WithActivationTypes<false>(args.input.dtype, args.weight.dtype,
                             [&](auto a, auto t) { RunTyped<decltype(a), decltype(t)>(args, parallel); });
}

}  // namespace gradfuse::cpu
