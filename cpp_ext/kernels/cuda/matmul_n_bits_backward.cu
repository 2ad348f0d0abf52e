#include "gradfuse/ops/matmul_n_bits_backward.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Params {
  const T* grad;
  const uint8_t* weight;
  const T* scales;
  const uint8_t* zero_points;
  T* out;
  int64_t total;
  int64_t depth;
  int64_t columns;
  int64_t blocks;
  int64_t size;
  int64_t row_bytes;
  int64_t zero_point_bytes;
  int bits;
};

// Each thread adds up an element of the result, row by row of the weight.
template <class T>
__global__ void __launch_bounds__(kThreads) GradInput(const __grid_constant__ Params<T> p) {
  const int mask = (1 << p.bits) - 1;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < p.total; index += stride) {
    const int64_t column = index % p.columns;
    const int64_t block = column / p.size;
    const T* grad = p.grad + index / p.columns * p.depth;
    const int64_t at = column * p.bits / 8;
    const int shift = static_cast<int>(column * p.bits % 8);
    const int64_t zero_at = block * p.bits / 8;
    const int zero_shift = static_cast<int>(block * p.bits % 8);
    float sum = 0;
    for (int64_t row = 0; row < p.depth; ++row) {
      int zero = 1 << (p.bits - 1);
      if (p.zero_points != nullptr) zero = (p.zero_points[row * p.zero_point_bytes + zero_at] >> zero_shift) & mask;
      const int number = (p.weight[row * p.row_bytes + at] >> shift) & mask;
      sum += Widen(grad[row]) * (static_cast<float>(number - zero) * Widen(p.scales[row * p.blocks + block]));
    }
    p.out[index] = Narrow<T>(sum);
  }
}

template <class T>
Status RunTyped(const MatmulNBitsBackwardArgs& args, const Queue& queue) {
  Params<T> params{};
  params.grad = args.grad_output.Data<T>();
  params.weight = args.weight.Data<uint8_t>();
  params.scales = args.scales.Data<T>();
  params.zero_points = args.zero_points ? args.zero_points->Data<uint8_t>() : nullptr;
  params.out = args.grad_input.MutableData<T>();
  params.total = args.grad_input.NumElements();
  params.depth = args.weight.shape[0];
  params.columns = args.in_features;
  params.blocks = args.Blocks();
  params.size = args.BlockSize();
  params.row_bytes = args.Blocks() * args.weight.shape[2];
  params.zero_point_bytes = args.ZeroPointBytes();
  params.bits = static_cast<int>(args.bits);
  return Launch(queue, GradInput<T>, CeilDiv(params.total, kThreads), kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const MatmulNBitsBackwardArgs&) { return 0; }

Status Run(const MatmulNBitsBackwardArgs& args, const Queue& queue) {
  return WithShortFloatType(args.grad_output.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
