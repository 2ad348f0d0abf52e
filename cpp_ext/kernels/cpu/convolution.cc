#include "gradfuse/ops/convolution.h"

#include <optional>

#include "kernels/convolution_geometry.h"
#include "kernels/cpu/convolutions.h"
#include "kernels/cpu/operands.h"
#include "kernels/dispatch.h"

namespace gradfuse::cpu {
namespace {

// Adds each channel's bias, if not null, to its plane, and with `relu` sets numbers below 0 to 0.
template <class T>
void Finish(const T* bias, bool relu, int64_t planes, int64_t channels, int64_t size, T* out,
            const ParallelFor& parallel) {
  if (bias == nullptr && !relu) return;
  parallel(planes, 2 * planes * size * static_cast<int64_t>(sizeof(T)), [&](int64_t plane) {
    const T added = bias == nullptr ? T{} : bias[plane % channels];
    T* const to = out + plane * size;
    for (int64_t i = 0; i < size; ++i) {
      const T value = to[i] + added;
      to[i] = relu && value < 0 ? T{} : value;
    }
  });
}

template <class T>
void RunTyped(const ConvolutionArgs& args, const ParallelFor& parallel) {
  using Real = ComputeType<T>;
  const Shape output = OutputShapes(args)[0];
  const ConvolutionGeometry geometry(args, args.input.shape, output);
  const Operand<T> input(args.input, parallel);
  const Operand<T> weight(args.weight, parallel);
  std::optional<Operand<T>> bias;
  if (args.bias) bias.emplace(*args.bias, parallel);
  const Real* const added = bias ? bias->data() : nullptr;
  const bool relu = args.relu != 0;
  Result<T> result(args.output);
  if (args.transposed != 0) {
    TransposedConvolution(geometry, input.data(), weight.data(), result.data(), parallel);
    Finish(added, relu, output[0] * output[1], output[1], geometry.large_size, result.data(), parallel);
  } else {
    Convolution(geometry, input.data(), weight.data(), added, relu, result.data(), parallel);
  }
  result.Finish(parallel);
}

}  // namespace

void Run(const ConvolutionArgs& args, const ParallelFor& parallel) {
  WithFloatType(args.input.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
