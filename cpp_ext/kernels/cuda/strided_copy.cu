#include "gradfuse/loops.h"
#include "gradfuse/strided_copy.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;

template <class Word>
struct Params {
  const Word* from;
  Word* to;
  int64_t total;
  Loops<2> loops;
  Divisor sizes[kMaxRank];  // of the loops
};

template <class Word>
__global__ void Copy(Params<Word> params) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < params.total; at += step) {
    int64_t rest = at;
    int64_t from = 0;
    int64_t to = 0;
    for (int axis = params.loops.rank - 1; axis >= 0; --axis) {
      int64_t index;
      params.sizes[axis].Divide(rest, rest, index);
      from += index * params.loops.strides[axis][0];
      to += index * params.loops.strides[axis][1];
    }
    params.to[to] = params.from[from];
  }
}

template <class Word>
Status CopyWords(const Tensor& from, const MutableTensor& to, const Queue& queue) {
  Params<Word> params{};
  params.from = from.Data<Word>();
  params.to = to.MutableData<Word>();
  params.total = from.NumElements();
  if (params.total == 0) return {};
  params.loops = Loops<2>(from.shape, {&from, &to});
  for (int axis = 0; axis < params.loops.rank; ++axis) params.sizes[axis] = Divisor(params.loops.sizes[axis]);
  return Launch(queue, Copy<Word>, CeilDiv(params.total, kThreads), kThreads, params);
}

}  // namespace

Status StridedCopy(const Tensor& from, const MutableTensor& to, const Queue& queue) {
  switch (SizeOf(from.dtype)) {
    case 1: return CopyWords<uint8_t>(from, to, queue);
    case 2: return CopyWords<uint16_t>(from, to, queue);
    case 4: return CopyWords<uint32_t>(from, to, queue);
    default: return CopyWords<uint64_t>(from, to, queue);
  }
}

}  // namespace gradfuse::cuda
