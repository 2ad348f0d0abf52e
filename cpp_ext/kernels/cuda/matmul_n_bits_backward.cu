#include "gradfuse/ops/matmul_n_bits_backward.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/packed_weight.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Params {
  PackedNumbers<T> packed;
  const T* grad;
  T* out;
  int64_t total;
  int64_t depth;
  int64_t columns;
};

// Each thread adds up an element of the result, row by row of the weight.
template <class T>
__global__ void __launch_bounds__(kThreads) GradInput(const __grid_constant__ Params<T> p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < p.total; index += stride) {
    const int64_t column = index % p.columns;
    const T* grad = p.grad + index / p.columns * p.depth;
    float sum = 0;
    for (int64_t k = 0; k < p.depth; ++k) sum += Widen(grad[k]) * p.packed.At(k, column);
    p.out[index] = Narrow<T>(sum);
  }
}

template <class T>
Status RunTyped(const MatmulNBitsBackwardArgs& args, const Queue& queue) {
  Params<T> params{PackedNumbers<T>(args)};
  params.grad = args.grad_output.Data<T>();
  params.out = args.grad_input.MutableData<T>();
  params.total = args.grad_input.NumElements();
  params.depth = args.OutFeatures();
  params.columns = args.in_features;
  return Launch(queue, GradInput<T>, CeilDiv(params.total, kThreads), kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const MatmulNBitsBackwardArgs&) { return 0; }

Status Run(const MatmulNBitsBackwardArgs& args, const Queue& queue) {
  return WithShortFloatType(args.grad_output.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
