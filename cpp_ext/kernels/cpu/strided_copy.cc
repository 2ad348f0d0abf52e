#include "gradfuse/strided_copy.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "gradfuse/loops.h"
#include "kernels/dispatch.h"

namespace gradfuse::cpu {
namespace {

constexpr int kFrom = 0;
constexpr int kTo = 1;
using CopyLoops = Loops<2>;

template <class Word>
void CopyRow(const Word* from, int64_t from_stride, Word* to, int64_t to_stride, int64_t count) {
  if (from_stride == 1 && to_stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(Word));
    return;
  }
  for (int64_t i = 0; i < count; ++i) to[i * to_stride] = from[i * from_stride];
}

// Whether two elements of a tensor may lie at one place. May say so where none do.
bool MayOverlapItself(const CopyLoops& loops) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int axis = 0; axis < loops.rank; ++axis) dims.emplace_back(loops.strides[axis][kTo], loops.sizes[axis]);
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // the distance between the first and the last element of the dimensions so far
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

template <class Word>
void CopyWords(const Tensor& from, const MutableTensor& to, const ParallelFor& parallel) {
  const int64_t total = from.NumElements();
  if (total == 0) return;
  const CopyLoops loops(from.shape, {&from, &to});
  const int row_axis = loops.inner();
  const int64_t row_size = loops.sizes[row_axis];
  const int64_t (&row_strides)[2] = loops.strides[row_axis];
  constexpr int64_t kTask = 32768;
  // Tasks that write to one place keep to one thread.
  const int64_t cost = MayOverlapItself(loops) ? 0 : 2 * from.NumBytes();
  parallel(CeilDiv(total, kTask), cost, [&](int64_t task) {
    const int64_t end = std::min(total, (task + 1) * kTask);
    for (int64_t at = task * kTask; at < end;) {
      const Word* source = from.Data<Word>();
      Word* target = to.MutableData<Word>();
      const int64_t position = at % row_size;
      int64_t rest = at / row_size;
      for (int axis = row_axis - 1; axis >= 0; --axis) {
        const int64_t index = rest % loops.sizes[axis];
        rest /= loops.sizes[axis];
        source += index * loops.strides[axis][kFrom];
        target += index * loops.strides[axis][kTo];
      }
      const int64_t count = std::min(end - at, row_size - position);
      CopyRow(source + position * row_strides[kFrom], row_strides[kFrom], target + position * row_strides[kTo],
              row_strides[kTo], count);
      at += count;
    }
  });
}

}  // namespace

void StridedCopy(const Tensor& from, const MutableTensor& to, const ParallelFor& parallel) {
  switch (SizeOf(from.dtype)) {
    case 1: return CopyWords<uint8_t>(from, to, parallel);
    case 2: return CopyWords<uint16_t>(from, to, parallel);
    case 4: return CopyWords<uint32_t>(from, to, parallel);
    default: return CopyWords<uint64_t>(from, to, parallel);
  }
}

}  // namespace gradfuse::cpu
