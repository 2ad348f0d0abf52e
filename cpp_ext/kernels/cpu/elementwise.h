#pragma once

#include <algorithm>
#include <cstdint>

#include "gradfuse/parallel.h"
#include "gradfuse/tensor.h"
#include "kernels/cpu/streaming.h"
#include "kernels/dispatch.h"

namespace gradfuse::cpu {

// For operators that make one tensor of two of its shape, element by element: calls body(begin, count) for all of them,
// in parts. What they write goes around the caches if `streams`, for which their size is the reason: Streams(tensor).
inline int64_t BytesOfThree(const TensorLayout& tensor) { return 3 * tensor.NumBytes(); }
inline bool Streams(const TensorLayout& tensor) { return BytesOfThree(tensor) >= StreamBytes(); }

template <class Body>
void ForEachPart(const TensorLayout& tensor, const ParallelFor& parallel, const Body& body) {
  constexpr int64_t kPart = 16384;
  const int64_t total = tensor.NumElements();
  const bool streams = Streams(tensor);
  parallel(CeilDiv(total, kPart), BytesOfThree(tensor), [&](int64_t part) {
    const StreamFence fence(streams);
    const int64_t begin = part * kPart;
    body(begin, std::min(kPart, total - begin));
  });
}

}  // namespace gradfuse::cpu
