#include "gradfuse/ops/matmul_n_bits.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/packed_weight.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Params {
  PackedNumbers<T> packed;
  const T* input;
  const T* bias;
  T* out;
  int64_t total;
  int64_t depth;
  int64_t columns;
};

// Each thread adds up an element of the result.
template <class T>
__global__ void __launch_bounds__(kThreads) Output(const __grid_constant__ Params<T> p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < p.total; index += stride) {
    const int64_t column = index % p.columns;
    const T* input = p.input + index / p.columns * p.depth;
    float sum = 0;
    for (int64_t k = 0; k < p.depth; ++k) sum += Widen(input[k]) * p.packed.At(column, k);
    if (p.bias != nullptr) sum += Widen(p.bias[column]);
    p.out[index] = Narrow<T>(sum);
  }
}

template <class T>
Status RunTyped(const MatmulNBitsArgs& args, const Queue& queue) {
  Params<T> params{PackedNumbers<T>(args)};
  params.input = args.input.Data<T>();
  params.bias = args.bias ? args.bias->Data<T>() : nullptr;
  params.out = args.output.MutableData<T>();
  params.total = args.output.NumElements();
  params.depth = args.InFeatures();
  params.columns = args.OutFeatures();
  return Launch(queue, Output<T>, CeilDiv(params.total, kThreads), kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const MatmulNBitsArgs&) { return 0; }

Status Run(const MatmulNBitsArgs& args, const Queue& queue) {
  return WithShortFloatType(args.input.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
