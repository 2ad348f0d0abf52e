#include <algorithm>

#include "gradfuse/ops/cast_bfloat16.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;

template <class From, class To, int kVec>
__global__ void __launch_bounds__(kThreads) CastKernel(const From* from, int64_t total, To* to) {
  const int64_t stride = int64_t{gridDim.x} * kThreads * kVec;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVec; i < total; i += stride) {
    if (i + kVec <= total) {
      const auto numbers = LoadOnce<Pack<From, kVec>>(from + i);
      Pack<To, kVec> results;
#pragma unroll
      for (int k = 0; k < kVec; ++k) results.values[k] = Narrow<To>(Widen(numbers.values[k]));
      StoreOnce(to + i, results);
    } else {
      for (int64_t k = i; k < total; ++k) to[k] = Narrow<To>(Widen(from[k]));
    }
  }
}

template <class From, class To>
Status RunTyped(const CastBfloat16Args& args, const Queue& queue) {
  const From* const from = args.self.Data<From>();
  To* const to = args.output.MutableData<To>();
  const int64_t total = args.self.NumElements();
  const auto start = [&](auto* kernel, int lanes) {
    return Launch(queue, kernel, CeilDiv(total, int64_t{kThreads} * lanes), kThreads, from, total, to);
  };
  constexpr int kVec = std::min(kWidest<From>, kWidest<To>);
  if (IsAligned(from) && IsAligned(to)) return start(CastKernel<From, To, kVec>, kVec);
  return start(CastKernel<From, To, 1>, 1);
}

}  // namespace

int64_t WorkspaceBytes(const CastBfloat16Args&) { return 0; }

Status Run(const CastBfloat16Args& args, const Queue& queue) {
  return args.self.dtype == DType::kFloat32 ? RunTyped<float, BFloat16>(args, queue)
                                            : RunTyped<BFloat16, float>(args, queue);
}

}  // namespace gradfuse::cuda
