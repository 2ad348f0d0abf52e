#include "gradfuse/ops/scaled_dot_product_attention.h"
#include "kernels/cuda/attention.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = kAttentionThreads;

template <class T>
struct Params {
  AttentionScores<T> scores;
  T* output;
  ComputeType<T>* logsumexp;
};

// The largest of a number of each thread of a block, the same in each thread.
template <class Real>
__device__ Real LargestOfBlock(Real value) {
  GRADFUSE_SHARED(Real, largest, kThreads / kWarp);
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const Real other = ShuffleXor(value, mask);
    if (other > value) value = other;
  }
  if (threadIdx.x % kWarp == 0) largest[threadIdx.x / kWarp] = value;
  Barrier();
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    if (largest[warp] > value) value = largest[warp];
  }
  Barrier();
  return value;
}

// A block of threads has a row: its threads share the keys, and then the columns of the output.
template <class T>
__global__ void __launch_bounds__(kThreads) Rows(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  GRADFUSE_SHARED(Real, parts, kThreads);
  const AttentionScores<T>& scores = params.scores;
  const AttentionSizes& sizes = scores.sizes;
  const int64_t total = sizes.batch * sizes.heads * sizes.rows;
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t index = blockIdx.x; index < total; index += gridDim.x) {
    const int64_t head = index / sizes.rows;
    const int64_t row = index % sizes.rows;
    const int64_t group = sizes.KeyHead(head);
    const int64_t seen = scores.causal.Seen(row);
    Real largest = Never<Real>();
    for (int64_t key = thread; key < seen; key += kThreads) {
      const Real score = scores.Score(head, group, row, key);
      if (score > largest) largest = score;
    }
    largest = LargestOfBlock(largest);
    const Real shift = largest == Never<Real>() ? Real{0} : largest;
    Real sum = 0;
    for (int64_t key = thread; key < seen; key += kThreads) sum += Exp(scores.Score(head, group, row, key) - shift);
    sum = SumOverBlock<kThreads>(sum);
    const Real divisor = sum == 0 ? Real{1} : sum;
    if (thread == 0) params.logsumexp[index] = shift + Log(divisor);

    const T* const values = scores.value + group * sizes.keys * sizes.value_width;
    for (int64_t first = 0; first < sizes.value_width; first += kThreads) {
      const int64_t column = first + thread;
      Real output = 0;
      for (int64_t begin = 0; begin < seen; begin += kThreads) {
        const int64_t key = begin + thread;
        Real part = 0;
        if (key < seen) {
          part = Exp(scores.Score(head, group, row, key) - shift) * scores.Gain(head, row, key);
        }
        parts[thread] = part;
        Barrier();
        const int64_t count = seen - begin < kThreads ? seen - begin : kThreads;
        for (int64_t i = 0; i < count && column < sizes.value_width; ++i) {
          output += parts[i] * Widen(values[(begin + i) * sizes.value_width + column]);
        }
        Barrier();
      }
      if (column < sizes.value_width) {
        params.output[index * sizes.value_width + column] = Narrow<T>(output / divisor);
      }
    }
  }
}

template <class T>
Status RunTyped(const ScaledDotProductAttentionArgs& args, const Queue& queue) {
  const Params<T> params{AttentionScores<T>(args), args.output.MutableData<T>(),
                         args.logsumexp.MutableData<ComputeType<T>>()};
  return Launch(queue, Rows<T>, args.logsumexp.NumElements(), kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const ScaledDotProductAttentionArgs&) { return 0; }

Status Run(const ScaledDotProductAttentionArgs& args, const Queue& queue) {
  return WithFloatType(args.query.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
