#include "gradfuse/ops/embedding_dense_backward.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMostSlices = 256;
constexpr int32_t kIndicesPlace = 2;

// The rows of the weight are cut into slices. A thread adds up one column of one slice: it looks at all indices in
// order, which its block shares, and takes those of its slice. So sums have one order, and no two threads one element.
template <class T>
struct Params {
  const T* grad;
  const void* indices;
  bool is_int32;
  T* out;
  int64_t count;  // of indices
  int64_t columns;
  int64_t num_weights;
  int64_t padding_idx;
  bool scales;
  int64_t slices;
  int64_t slice_rows;
  int64_t panels;  // of columns
  int32_t* fault;
  // Workspace.
  float* sums;      // (num_weights, columns), for types of 16 bits; else the output
  int32_t* counts;  // (num_weights,), where they scale
};

template <class T>
__device__ int64_t IndexAt(const Params<T>& params, int64_t i) {
  if (params.is_int32) return static_cast<const int32_t*>(params.indices)[i];
  return static_cast<const int64_t*>(params.indices)[i];
}

// How often each row was looked up.
template <class T>
__global__ void __launch_bounds__(kThreads) Count(const __grid_constant__ Params<T> params) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < params.num_weights;
       row += stride) {
    int32_t count = 0;
    for (int64_t i = 0; i < params.count; ++i) count += IndexAt(params, i) == row ? 1 : 0;
    params.counts[row] = count;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) Sum(const __grid_constant__ Params<T> params) {
  GRADFUSE_SHARED(int64_t, indices, kThreads);
  for (int64_t task = blockIdx.x; task < params.slices * params.panels; task += gridDim.x) {
    const int64_t slice = task / params.panels;
    const int64_t column = (task - slice * params.panels) * kThreads + threadIdx.x;
    const bool has_column = column < params.columns;
    const int64_t begin = slice * params.slice_rows;
    const int64_t end = begin + params.slice_rows < params.num_weights ? begin + params.slice_rows : params.num_weights;
    for (int64_t row = begin; has_column && row < end; ++row) params.sums[row * params.columns + column] = 0;
    for (int64_t first = 0; first < params.count; first += kThreads) {
      const int64_t mine = first + threadIdx.x;
      const int64_t index = mine < params.count ? IndexAt(params, mine) : params.padding_idx;
      const bool fits = index >= 0 && index < params.num_weights;
      if (!fits && index != params.padding_idx) SetFault(params.fault, kIndicesPlace);
      indices[threadIdx.x] = fits && index != params.padding_idx ? index : -1;
      Barrier();
      const int64_t some = params.count - first < kThreads ? params.count - first : kThreads;
      for (int64_t i = 0; has_column && i < some; ++i) {
        const int64_t row = indices[i];
        if (row < begin || row >= end) continue;
        params.sums[row * params.columns + column] += Widen(params.grad[(first + i) * params.columns + column]);
      }
      Barrier();
    }
    for (int64_t row = begin; has_column && row < end; ++row) {
      const int64_t place = row * params.columns + column;
      float sum = params.sums[place];
      if (params.scales && params.counts[row] > 1) sum *= 1.0f / static_cast<float>(params.counts[row]);
      params.out[place] = Narrow<T>(sum);
    }
  }
}

template <class T>
Params<T> ParamsOf(const EmbeddingDenseBackwardArgs& args, Workspace& workspace) {
  Params<T> params{};
  params.grad = args.grad_output.Data<T>();
  params.indices = args.indices.data;
  params.is_int32 = args.indices.dtype == DType::kInt32;
  params.out = args.grad_weight.MutableData<T>();
  params.count = args.indices.NumElements();
  params.columns = args.grad_output.shape[args.grad_output.shape.rank() - 1];
  params.num_weights = args.num_weights;
  params.padding_idx = args.padding_idx;
  params.scales = args.scale_grad_by_freq != 0;
  params.slices = std::min<int64_t>(kMostSlices, args.num_weights);
  params.slice_rows = params.slices == 0 ? 0 : CeilDiv(args.num_weights, params.slices);
  params.panels = CeilDiv(params.columns, kThreads);
  float* sums = workspace.Array<float>(sizeof(T) == sizeof(float) ? 0 : params.num_weights * params.columns);
  if constexpr (sizeof(T) == sizeof(float)) {
    params.sums = params.out;
  } else {
    params.sums = sums;
  }
  params.counts = workspace.Array<int32_t>(params.scales ? params.num_weights : 0);
  return params;
}

template <class T>
Status RunTyped(const EmbeddingDenseBackwardArgs& args, const Queue& queue) {
  Workspace workspace(queue.workspace);
  Params<T> params = ParamsOf<T>(args, workspace);
  params.fault = queue.fault;
  if (params.num_weights == 0 || params.columns == 0) return {};
  if (params.scales) {
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, Count<T>, CeilDiv(params.num_weights, kThreads), kThreads, params));
  }
  return Launch(queue, Sum<T>, params.slices * params.panels, kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const EmbeddingDenseBackwardArgs& args) {
  Workspace workspace(nullptr);
  WithShortFloatType(args.grad_output.dtype, [&](auto type) { ParamsOf<decltype(type)>(args, workspace); });
  return workspace.bytes();
}

Status Run(const EmbeddingDenseBackwardArgs& args, const Queue& queue) {
  return WithShortFloatType(args.grad_output.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
