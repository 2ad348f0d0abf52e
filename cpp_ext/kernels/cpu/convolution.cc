#include "gradfuse/ops/convolution.h"

#include <optional>

#include "kernels/convolution_geometry.h"
#include "kernels/cpu/convolution_products.h"
#include "kernels/cpu/operands.h"
#include "kernels/dispatch.h"

namespace gradfuse::cpu {

void Run(const ConvolutionArgs& args, const ParallelFor& parallel) {
  WithActivationTypes<false>(args.input.dtype, args.weight.dtype, [&](auto a, auto t) {
    using Products = ConvolutionProducts<decltype(a), decltype(t)>;
    const ConvolutionGeometry geometry(args, args.input.shape, args.output.shape);
    std::optional<Operand<typename Products::Real>> bias;
    if (args.bias) bias.emplace(*args.bias, parallel);
    Products(args, geometry, parallel)
        .Convolve(args.transposed == 0, args.input, bias ? bias->data() : nullptr, args.relu != 0, args.output);
  });
}

}  // namespace gradfuse::cpu
