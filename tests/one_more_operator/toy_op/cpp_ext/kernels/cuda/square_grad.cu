#include "gradfuse/ops/square_grad.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) Gradients(const T* grad, const T* x, float factor, int64_t total, T* out) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += stride) {
    out[i] = Narrow<T>(factor * Widen(x[i]) * Widen(grad[i]));
  }
}

template <class T>
Status RunTyped(const SquareGradArgs& args, const Queue& queue) {
  const int64_t total = args.x.NumElements();
  return Launch(queue, Gradients<T>, CeilDiv(total, kThreads), kThreads, args.grad.Data<T>(), args.x.Data<T>(),
                args.factor, total, args.grad_x.MutableData<T>());
}

}  // namespace

int64_t WorkspaceBytes(const SquareGradArgs&) { return 0; }

Status Run(const SquareGradArgs& args, const Queue& queue) {
  return WithShortFloatType(args.x.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
