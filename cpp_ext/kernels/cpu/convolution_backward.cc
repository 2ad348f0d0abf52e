#include "gradfuse/ops/convolution_backward.h"

#include "kernels/convolution_geometry.h"
#include "kernels/cpu/convolutions.h"
#include "kernels/cpu/operands.h"
#include "kernels/dispatch.h"

namespace gradfuse::cpu {
namespace {

// Sums over the batch and the places of a channel.
template <class T>
void GradBias(const T* grad, int64_t batch, int64_t channels, int64_t size, T* out, const ParallelFor& parallel) {
  parallel(channels, batch * channels * size * static_cast<int64_t>(sizeof(T)), [&](int64_t channel) {
    double sum = 0;
    for (int64_t n = 0; n < batch; ++n) {
      const T* from = grad + (n * channels + channel) * size;
      for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(from[i]);
    }
    out[channel] = static_cast<T>(sum);
  });
}

template <class T>
void RunTyped(const ConvolutionBackwardArgs& args, const ParallelFor& parallel) {
  const ConvolutionGeometry geometry(args, args.input.shape, args.grad_output.shape);
  const bool transposed = args.transposed != 0;
  const Operand<T> grad_output(args.grad_output, parallel);
  if (args.output_mask[0] != 0) {
    const Operand<T> weight(args.weight, parallel);
    Result<T> result(args.grad_input);
    if (transposed) {
      Convolution<ComputeType<T>>(geometry, grad_output.data(), weight.data(), nullptr, false, result.data(), parallel);
    } else {
      TransposedConvolution(geometry, grad_output.data(), weight.data(), result.data(), parallel);
    }
    result.Finish(parallel);
  }
  if (args.output_mask[1] != 0) {
    const Operand<T> input(args.input, parallel);
    Result<T> result(args.grad_weight);
    GradWeight(geometry, transposed ? input.data() : grad_output.data(), transposed ? grad_output.data() : input.data(),
               result.data(), parallel);
    result.Finish(parallel);
  }
  if (args.output_mask[2] != 0) {
    const int64_t channels = args.grad_output.shape[1];
    const int64_t size = transposed ? geometry.large_size : geometry.small_size;
    Result<T> result(args.grad_bias);
    GradBias(grad_output.data(), geometry.batch, channels, size, result.data(), parallel);
    result.Finish(parallel);
  }
}

}  // namespace

void Run(const ConvolutionBackwardArgs& args, const ParallelFor& parallel) {
  WithFloatType(args.input.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
