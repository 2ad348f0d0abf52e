// The memory roof: as many bytes as an op must move, read and written by the same number of threads with nothing
// computed in between. Built and called by ops.py.

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 64;  // bytes

using Words = uint64_t __attribute__((vector_size(kBlock), aligned(8)));

Words Load(const char* data) {
  Words words;
  std::memcpy(&words, data, kBlock);
  return words;
}

template <bool kStreaming>
void Store(char* data, Words words) {
#if defined(__AVX512F__)
  if constexpr (kStreaming) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(data), reinterpret_cast<__m512i&>(words));
    return;
  }
#elif defined(__AVX2__)
  if constexpr (kStreaming) {
    __m256i halves[2];
    std::memcpy(halves, &words, kBlock);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(data), halves[0]);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(data) + 1, halves[1]);
    return;
  }
#endif
  std::memcpy(data, &words, kBlock);
}

template <int kInputs, bool kWrites, bool kStreaming>
uint64_t Sweep(const char* const* in, char* out, int64_t begin, int64_t end) {
  Words sum = {};
  for (int64_t at = begin; at < end; at += kBlock) {
    Words words = Load(in[0] + at);
    if constexpr (kInputs > 1) words ^= Load(in[1] + at);
    if constexpr (kInputs > 2) words ^= Load(in[2] + at);
    if constexpr (kWrites) {
      Store<kStreaming>(out + at, words);
    } else {
      sum ^= words;
    }
  }
  uint64_t total = 0;
  for (int lane = 0; lane < 8; ++lane) total ^= sum[lane];
  return total;
}

template <bool kWrites, bool kStreaming>
uint64_t Sweep(int inputs, const char* const* in, char* out, int64_t begin, int64_t end) {
  switch (inputs) {
    case 1: return Sweep<1, kWrites, kStreaming>(in, out, begin, end);
    case 2: return Sweep<2, kWrites, kStreaming>(in, out, begin, end);
    default: return Sweep<3, kWrites, kStreaming>(in, out, begin, end);
  }
}

}  // namespace

// Reads `bytes` bytes, a multiple of 64, of each of 1 to 3 inputs, and writes as many unless `out` is null. All are
// aligned to 64 bytes.
extern "C" uint64_t gradfuse_traffic(const char* const* in, int inputs, char* out, int64_t bytes, int threads,
                                     int streaming) {
  const int64_t blocks = bytes / kBlock;
  uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(^ : total)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t begin = blocks * thread / threads * kBlock;
    const int64_t end = blocks * (thread + 1) / threads * kBlock;
    if (out == nullptr) {
      total ^= Sweep<false, false>(inputs, in, out, begin, end);
    } else if (streaming != 0) {
      total ^= Sweep<true, true>(inputs, in, out, begin, end);
    } else {
      total ^= Sweep<true, false>(inputs, in, out, begin, end);
    }
  }
  return total;
}
