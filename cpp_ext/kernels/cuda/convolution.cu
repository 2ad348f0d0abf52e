#include "gradfuse/ops/convolution.h"
#include "kernels/convolution_geometry.h"
#include "kernels/cuda/convolutions.cuh"

namespace gradfuse::cuda {
namespace {

template <class A, class T>
Status RunTyped(const ConvolutionArgs& args, const Queue& queue) {
  const ConvolutionGeometry geometry(args, args.input.shape, OutputShapes(args)[0]);
  const bool transposed = args.transposed != 0;
  const A* const input = args.input.Data<A>();
  ConvolutionParams<A, T> params{geometry, transposed ? input : nullptr, transposed ? nullptr : input,
                                 args.weight.Data<T>(), args.output.MutableData<A>()};
  params.bias = args.bias ? args.bias->Data<T>() : nullptr;
  params.relu = args.relu != 0;
  params.rounds = args.factors_in_bfloat16 != 0;
  const int64_t blocks = CeilDiv(args.output.NumElements(), kConvolutionThreads);
  return Launch(queue, transposed ? TransposedConvolution<A, T> : Convolution<A, T>, blocks, kConvolutionThreads,
                params);
}

}  // namespace

int64_t WorkspaceBytes(const ConvolutionArgs&) { return 0; }

Status Run(const ConvolutionArgs& args, const Queue& queue) {
  return WithActivationTypes<false>(args.input.dtype, args.weight.dtype,
                                    [&](auto a, auto t) { return RunTyped<decltype(a), decltype(t)>(args, queue); });
}

}  // namespace gradfuse::cuda
