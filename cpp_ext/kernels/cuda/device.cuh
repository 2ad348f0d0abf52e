#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "gradfuse/float16.h"
#include "gradfuse/queue.h"
#include "gradfuse/status.h"
#include "gradfuse/tensor.h"
#include "kernels/dispatch.h"

// All that kernels use of the device beyond plain C++, so that their source builds for the device with nvcc, and in
// tests for the host with tests/simt, which runs them in threads of its own.
#ifdef GRADFUSE_SIMT
#include "tests/simt/simt.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

namespace gradfuse::cuda {

constexpr int kWarp = 32;

// kCount neighbouring elements that move in one access.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

// The elements of the widest access.
template <class T>
constexpr int kWidest = 16 / static_cast<int>(sizeof(T));

// Whether accesses of 16 bytes may begin at `pointer`.
inline bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

#ifdef GRADFUSE_SIMT

#define GRADFUSE_SHARED(type, name, count) \
  static char name##_place;                \
  type* const name = ::gradfuse::simt::SharedArray<type>(&name##_place, count)

inline void Barrier() { simt::Barrier(); }
inline void WarpBarrier() { simt::WarpBarrier(); }
template <class T>
T ShuffleXor(T value, int mask) {
  return simt::ShuffleXor(value, mask);
}

// Loads and stores of data that is used once.
template <class P>
P LoadOnce(const void* address) {
  return simt::Load<P>(address);
}
template <class P>
void StoreOnce(void* address, const P& pack) {
  simt::Store(address, pack);
}
inline void PrefetchToL2(const void* address) { simt::Load<char>(address); }

inline float Widen(Half value) { return ToCompute(value); }
inline float Widen(BFloat16 value) { return ToCompute(value); }
inline void Narrow(float value, Half& out) { out = FromCompute<Half>(value); }
inline void Narrow(float value, BFloat16& out) { out = FromCompute<BFloat16>(value); }

inline float RoundedProduct(float a, float b) { return a * b; }
inline float RoundedSum(float a, float b) { return a + b; }

inline int64_t MaxBlocks() { return simt::MaxBlocks(); }
inline uint64_t MultiplyHigh(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

#else

#define GRADFUSE_SHARED(type, name, count) __shared__ type name[count]

__device__ inline void Barrier() { __syncthreads(); }
__device__ inline void WarpBarrier() { __syncwarp(); }
template <class T>
__device__ T ShuffleXor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

namespace internal {
template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using type = int4;
};
template <>
struct Word<8> {
  using type = int2;
};
template <>
struct Word<4> {
  using type = int;
};
template <>
struct Word<2> {
  using type = short;
};
template <>
struct Word<1> {
  using type = char;
};
}  // namespace internal

// Loads and stores of data that is used once.
template <class P>
__device__ P LoadOnce(const void* address) {
  using Word = typename internal::Word<sizeof(P)>::type;
  const Word word = __ldcs(static_cast<const Word*>(address));
  P pack;
  memcpy(&pack, &word, sizeof word);
  return pack;
}
template <class P>
__device__ void StoreOnce(void* address, const P& pack) {
  using Word = typename internal::Word<sizeof(P)>::type;
  Word word;
  memcpy(&word, &pack, sizeof word);
  __stcs(static_cast<Word*>(address), word);
}
__device__ inline void PrefetchToL2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

__device__ inline float Widen(Half value) { return __half2float(__ushort_as_half(value.bits)); }
__device__ inline float Widen(BFloat16 value) { return __uint_as_float(static_cast<uint32_t>(value.bits) << 16); }
__device__ inline void Narrow(float value, Half& out) { out.bits = __half_as_ushort(__float2half_rn(value)); }
__device__ inline void Narrow(float value, BFloat16& out) {
  out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// Each rounded: a product and a sum never become one instruction.
__device__ inline float RoundedProduct(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float RoundedSum(float a, float b) { return __fadd_rn(a, b); }

inline int64_t MaxBlocks() { return std::numeric_limits<int32_t>::max(); }
__device__ inline uint64_t MultiplyHigh(uint64_t a, uint64_t b) { return __umul64hi(a, b); }

#endif

// To the type that values are computed in, and back with one rounding to nearest even.
__device__ inline float Widen(float value) { return value; }
__device__ inline double Widen(double value) { return value; }
__device__ inline void Narrow(float value, float& out) { out = value; }
__device__ inline void Narrow(double value, double& out) { out = value; }
template <class T>
__device__ T Narrow(ComputeType<T> value) {
  T out;
  Narrow(value, out);
  return out;
}

__device__ inline float Exp(float x) { return expf(x); }
__device__ inline double Exp(double x) { return exp(x); }
__device__ inline float Log(float x) { return logf(x); }
__device__ inline double Log(double x) { return log(x); }

template <class Real>
__device__ Real Never() {
  return -std::numeric_limits<Real>::infinity();
}
template <class Real>
__device__ Real NotANumber() {
  return std::numeric_limits<Real>::quiet_NaN();
}

// The sum over groups of kLanes neighbouring lanes of a warp, the same in each and in an order that is always the same.
template <int kLanes, class Real>
__device__ Real SumOverLanes(Real value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value += ShuffleXor(value, mask);
  return value;
}

// The sum over a block of kThreads, the same in each thread and in an order that is always the same. Every thread
// calls it.
template <int kThreads, class Real>
__device__ Real SumOverBlock(Real value) {
  constexpr int kWarps = kThreads / kWarp;
  GRADFUSE_SHARED(Real, sums, kWarps);
  value = SumOverLanes<kWarp>(value);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
  Barrier();
  Real sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp];
  Barrier();
  return sum;
}

// Marks the input at `place` of the op's signature as one with values that the op does not take.
__device__ inline void SetFault(int32_t* fault, int32_t place) {
  if (fault != nullptr) *static_cast<volatile int32_t*>(fault) = place;
}

// n / divisor for 0 <= n < 2^63, without a division: n * m / 2^(63 + l), with 2^l the divisor rounded up to a power of
// two and m = 2^(63 + l) / divisor rounded up.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int64_t divisor) : divisor_(divisor) {
    while ((int64_t{1} << shift_) < divisor) ++shift_;
    const unsigned __int128 power = static_cast<unsigned __int128>(1) << (63 + shift_);
    multiplier_ = static_cast<uint64_t>((power + static_cast<uint64_t>(divisor) - 1) / static_cast<uint64_t>(divisor));
  }

  __device__ void Divide(int64_t n, int64_t& quotient, int64_t& rest) const {
    quotient =
        divisor_ == 1 ? n : static_cast<int64_t>(MultiplyHigh(static_cast<uint64_t>(n), multiplier_) >> (shift_ - 1));
    rest = n - quotient * divisor_;
  }

 private:
  int64_t divisor_ = 1;
  uint64_t multiplier_ = 0;
  int shift_ = 0;
};

// Starts a kernel of as many blocks as the device takes, at most `blocks`: kernels loop with the grid's size as stride.
template <class... Parameters, class... Arguments>
Status Launch(const Queue& queue, void (*kernel)(Parameters...), int64_t blocks, int threads, Arguments... arguments) {
  if (blocks == 0) return {};
  const auto grid = static_cast<unsigned>(std::min(blocks, MaxBlocks()));
#ifdef GRADFUSE_SIMT
  simt::Launch(queue.stream, grid, static_cast<unsigned>(threads),
               [=] { kernel(static_cast<Parameters>(arguments)...); });
#else
  std::tuple<Parameters...> values(static_cast<Parameters>(arguments)...);
  const cudaError_t error = std::apply(
      [&](Parameters&... value) {
        void* addresses[] = {&value...};
        return cudaLaunchKernel(kernel, dim3(grid), dim3(static_cast<unsigned>(threads)), addresses, 0,
                                static_cast<cudaStream_t>(queue.stream));
      },
      values);
  if (error != cudaSuccess) {
    return {StatusCode::kFailed, std::string("CUDA is unable to start a kernel: ") + cudaGetErrorString(error)};
  }
#endif
  return {};
}

// Cuts a workspace into arrays; with a null workspace, counts the bytes that they take.
class Workspace {
 public:
  explicit Workspace(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  T* Array(int64_t count) {
    auto* array = reinterpret_cast<T*>(memory_ == nullptr ? nullptr : memory_ + bytes_);
    bytes_ += CeilDiv(count * static_cast<int64_t>(sizeof(T)), kAlignment) * kAlignment;
    return array;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 256;
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace gradfuse::cuda
