#include "gradfuse/ops/scaled_dot_product_attention_backward.h"
#include "kernels/cuda/attention.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = kAttentionThreads;

template <class T>
struct Params {
  using Real = ComputeType<T>;

  AttentionScores<T> scores;
  const T* grad_output;
  const T* output;
  const Real* logsumexp;
  T* grad_query;
  T* grad_key;
  T* grad_value;
  // Workspace, (B, H, L) each.
  Real* row_sums;  // of grad_output output
  Real* shares;    // what exponentials of scores less logsumexp are multiplied by
};

template <class T>
struct Element {
  ComputeType<T> p;           // the probability, times what the dropout makes of 1
  ComputeType<T> grad_score;  // the gradient of the product of query and key
};

template <class T>
__device__ Element<T> ElementAt(const Params<T>& params, int64_t head, int64_t group, int64_t row, int64_t key) {
  using Real = ComputeType<T>;
  const AttentionScores<T>& scores = params.scores;
  const int64_t width = scores.sizes.value_width;
  const int64_t index = head * scores.sizes.rows + row;
  const Real p = Exp(scores.Score(head, group, row, key) - params.logsumexp[index]) * params.shares[index];
  const Real gain = scores.Gain(head, row, key);
  const T* const values = scores.value + (group * scores.sizes.keys + key) * width;
  Real through = 0;
  for (int64_t i = 0; i < width; ++i) through += Widen(params.grad_output[index * width + i]) * Widen(values[i]);
  return {p * gain, scores.scale * p * (gain * through - params.row_sums[index])};
}

// A block of threads has a row: its threads share the keys, and then the columns.
template <class T>
__global__ void __launch_bounds__(kThreads) OfQuery(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  GRADFUSE_SHARED(Real, grads, kThreads);
  const AttentionSizes& sizes = params.scores.sizes;
  const int64_t total = sizes.batch * sizes.heads * sizes.rows;
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t index = blockIdx.x; index < total; index += gridDim.x) {
    const int64_t head = index / sizes.rows;
    const int64_t row = index % sizes.rows;
    const int64_t group = sizes.KeyHead(head);
    Real sum = 0;
    for (int64_t i = thread; i < sizes.value_width; i += kThreads) {
      const int64_t place = index * sizes.value_width + i;
      sum += Widen(params.grad_output[place]) * Widen(params.output[place]);
    }
    sum = SumOverBlock<kThreads>(sum);
    const int64_t seen = params.scores.causal.Seen(row);
    Real share = 1;
    if (params.scores.added != nullptr && HasFewDigits(params.logsumexp[index])) {
      Real parts = 0;
      for (int64_t key = thread; key < seen; key += kThreads) {
        parts += Exp(params.scores.Score(head, group, row, key) - params.logsumexp[index]);
      }
      share = 1 / SumOverBlock<kThreads>(parts);
    }
    if (thread == 0) {
      params.row_sums[index] = sum;
      params.shares[index] = share;
    }
    Barrier();

    const T* const keys = params.scores.key + group * sizes.keys * sizes.width;
    for (int64_t first = 0; first < sizes.width; first += kThreads) {
      const int64_t column = first + thread;
      Real grad = 0;
      for (int64_t begin = 0; begin < seen; begin += kThreads) {
        const int64_t key = begin + thread;
        grads[thread] = key < seen ? ElementAt(params, head, group, row, key).grad_score : Real{0};
        Barrier();
        const int64_t count = seen - begin < kThreads ? seen - begin : kThreads;
        for (int64_t i = 0; i < count && column < sizes.width; ++i) {
          grad += grads[i] * Widen(keys[(begin + i) * sizes.width + column]);
        }
        Barrier();
      }
      if (column < sizes.width) params.grad_query[index * sizes.width + column] = Narrow<T>(grad);
    }
  }
}

// A block of threads has a key: its threads share the rows of all heads of queries, and then the columns.
template <class T>
__global__ void __launch_bounds__(kThreads) OfKey(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  GRADFUSE_SHARED(Real, grads, kThreads);
  GRADFUSE_SHARED(Real, probabilities, kThreads);
  const AttentionSizes& sizes = params.scores.sizes;
  const int64_t total = sizes.batch * sizes.groups * sizes.keys;
  const int64_t shared = sizes.heads / sizes.groups;
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t index = blockIdx.x; index < total; index += gridDim.x) {
    const int64_t group = index / sizes.keys;
    const int64_t key = index % sizes.keys;
    for (int64_t first = 0; first < sizes.width || first < sizes.value_width; first += kThreads) {
      const int64_t column = first + thread;
      Real grad_key = 0;
      Real grad_value = 0;
      for (int64_t head = group * shared; head < (group + 1) * shared; ++head) {
        const T* const queries = params.scores.query + head * sizes.rows * sizes.width;
        const T* const grad_output = params.grad_output + head * sizes.rows * sizes.value_width;
        for (int64_t begin = params.scores.causal.FirstRow(key); begin < sizes.rows; begin += kThreads) {
          const int64_t row = begin + thread;
          Element<T> element{};
          if (row < sizes.rows) element = ElementAt(params, head, group, row, key);
          grads[thread] = element.grad_score;
          probabilities[thread] = element.p;
          Barrier();
          const int64_t count = sizes.rows - begin < kThreads ? sizes.rows - begin : kThreads;
          for (int64_t i = 0; i < count && column < sizes.width; ++i) {
            grad_key += grads[i] * Widen(queries[(begin + i) * sizes.width + column]);
          }
          for (int64_t i = 0; i < count && column < sizes.value_width; ++i) {
            grad_value += probabilities[i] * Widen(grad_output[(begin + i) * sizes.value_width + column]);
          }
          Barrier();
        }
      }
      if (column < sizes.width) params.grad_key[index * sizes.width + column] = Narrow<T>(grad_key);
      if (column < sizes.value_width) params.grad_value[index * sizes.value_width + column] = Narrow<T>(grad_value);
    }
  }
}

template <class T>
Status RunTyped(const ScaledDotProductAttentionBackwardArgs& args, const Queue& queue) {
  using Real = ComputeType<T>;
  const int64_t rows = args.logsumexp.NumElements();
  Workspace workspace(queue.workspace);
  Real* const row_sums = workspace.Array<Real>(rows);
  Real* const shares = workspace.Array<Real>(rows);
  const Params<T> params{AttentionScores<T>(args),
                         args.grad_output.Data<T>(),
                         args.output.Data<T>(),
                         args.logsumexp.Data<Real>(),
                         args.grad_query.MutableData<T>(),
                         args.grad_key.MutableData<T>(),
                         args.grad_value.MutableData<T>(),
                         row_sums,
                         shares};
  GRADFUSE_RETURN_IF_ERROR(Launch(queue, OfQuery<T>, rows, kThreads, params));
  const Shape& key = args.key.shape;
  return Launch(queue, OfKey<T>, key[0] * key[1] * key[2], kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const ScaledDotProductAttentionBackwardArgs& args) {
  Workspace workspace(nullptr);
  WithFloatType(args.query.dtype, [&](auto type) {
    for (int array = 0; array < 2; ++array) {
      workspace.Array<ComputeType<decltype(type)>>(args.logsumexp.NumElements());
    }
  });
  return workspace.bytes();
}

Status Run(const ScaledDotProductAttentionBackwardArgs& args, const Queue& queue) {
  return WithFloatType(args.query.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
