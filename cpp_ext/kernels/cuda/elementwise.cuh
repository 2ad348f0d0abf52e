#pragma once

#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {

constexpr int kElementwiseThreads = 256;

template <class T, int kVec, class Function>
__global__ void __launch_bounds__(kElementwiseThreads)
    ElementwiseKernel(const T* first, const T* second, Function function, int64_t total, T* out) {
  const int64_t stride = int64_t{gridDim.x} * kElementwiseThreads * kVec;
  for (int64_t i = (int64_t{blockIdx.x} * kElementwiseThreads + threadIdx.x) * kVec; i < total; i += stride) {
    if (i + kVec <= total) {
      const auto firsts = LoadOnce<Pack<T, kVec>>(first + i);
      const auto seconds = LoadOnce<Pack<T, kVec>>(second + i);
      Pack<T, kVec> results;
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        results.values[k] = Narrow<T>(function(Widen(firsts.values[k]), Widen(seconds.values[k])));
      }
      StoreOnce(out + i, results);
    } else {
      for (int64_t k = i; k < total; ++k) out[k] = Narrow<T>(function(Widen(first[k]), Widen(second[k])));
    }
  }
}

// Writes function(a, b) for the elements a and b of two tensors of one shape, in the type that they are computed in.
template <class T, class Function>
Status RunElementwise(const Queue& queue, const Tensor& first, const Tensor& second, Function function,
                      const MutableTensor& out) {
  const T* const firsts = first.Data<T>();
  const T* const seconds = second.Data<T>();
  T* const results = out.MutableData<T>();
  const int64_t total = first.NumElements();
  const auto start = [&](auto* kernel, int lanes) {
    return Launch(queue, kernel, CeilDiv(total, int64_t{kElementwiseThreads} * lanes), kElementwiseThreads, firsts,
                  seconds, function, total, results);
  };
  if (IsAligned(firsts) && IsAligned(seconds) && IsAligned(results)) {
    return start(ElementwiseKernel<T, kWidest<T>, Function>, kWidest<T>);
  }
  return start(ElementwiseKernel<T, 1, Function>, 1);
}

}  // namespace gradfuse::cuda
