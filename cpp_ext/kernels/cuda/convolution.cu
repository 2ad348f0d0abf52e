#include "gradfuse/ops/convolution.h"
#include "kernels/convolution_geometry.h"
#include "kernels/cuda/convolutions.cuh"

namespace gradfuse::cuda {
namespace {

template <class T>
Status RunTyped(const ConvolutionArgs& args, const Queue& queue) {
  const ConvolutionGeometry geometry(args, args.input.shape, OutputShapes(args)[0]);
  const bool transposed = args.transposed != 0;
  const T* const input = args.input.Data<T>();
  ConvolutionParams<T> params{geometry, transposed ? input : nullptr, transposed ? nullptr : input,
                              args.weight.Data<T>(), args.output.MutableData<T>()};
  params.bias = args.bias ? args.bias->Data<T>() : nullptr;
  params.relu = args.relu != 0;
  const int64_t blocks = CeilDiv(args.output.NumElements(), kConvolutionThreads);
  return Launch(queue, transposed ? TransposedConvolution<T> : Convolution<T>, blocks, kConvolutionThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const ConvolutionArgs&) { return 0; }

Status Run(const ConvolutionArgs& args, const Queue& queue) {
  return WithFloatType(args.input.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
