#include "gradfuse/ops/grouped_bias_add_grad.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumnsPerBlock = 32;  // when partial sums are added up
constexpr int32_t kGroupIdxPlace = 2;

// Rows are cut into chunks of equal size. A thread adds up a few neighbouring columns of one chunk, group by group. A
// group inside of one chunk is finished there; partial sums of groups that cross chunks are added up in order of the
// chunks, in double. Of the groups in a chunk only the first and the last can reach over, so two partial sums a chunk
// are room enough.
template <class T>
struct Params {
  const T* grad_y;
  const void* group_idx;
  bool is_int32;
  T* out;
  int64_t groups;
  int64_t group_size;  // without group_idx
  int64_t rows;
  int64_t columns;
  int64_t chunk_rows;
  int64_t chunks;
  int32_t* fault;
  // Workspace.
  int64_t* ends;    // (groups,), with group_idx: within the rows, and not decreasing
  float* partials;  // (chunks, 2, columns): of the group that ends in the chunk, of the one that goes on
};

template <class T>
__device__ int64_t EndOf(const Params<T>& params, int64_t group) {
  return params.ends != nullptr ? params.ends[group] : (group + 1) * params.group_size;
}

template <class T>
__device__ int64_t BeginOf(const Params<T>& params, int64_t group) {
  return group == 0 ? 0 : EndOf(params, group - 1);
}

// The first group that ends after `row`, or their number.
template <class T>
__device__ int64_t GroupOf(const Params<T>& params, int64_t row) {
  if (params.ends == nullptr) return row / params.group_size;
  int64_t low = 0;
  int64_t high = params.groups;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (params.ends[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

template <class T>
__device__ float* PartialOf(const Params<T>& params, int64_t chunk, bool ends_here) {
  return params.partials + (2 * chunk + (ends_here ? 0 : 1)) * params.columns;
}

// Ends as the other kernels need them, whatever group_idx holds: one block.
template <class T>
__global__ void __launch_bounds__(kThreads) FillEnds(const __grid_constant__ Params<T> params) {
  constexpr int kEach = static_cast<int>(GroupedBiasAddGradArgs::kMaxGroups) / kThreads;
  const auto given = [&](int64_t group) -> int64_t {
    if (params.is_int32) return static_cast<const int32_t*>(params.group_idx)[group];
    return static_cast<const int64_t*>(params.group_idx)[group];
  };
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kEach;
  int64_t largest = 0;  // of the ends of this thread's groups
  for (int64_t group = first; group < first + kEach && group < params.groups; ++group) {
    const int64_t end = given(group);
    const int64_t previous = group == 0 ? 0 : given(group - 1);
    const bool is_last = group + 1 == params.groups;
    if (end < previous || end > params.rows || (is_last && end != params.rows)) SetFault(params.fault, kGroupIdxPlace);
    largest = end > largest ? end : largest;
  }
  GRADFUSE_SHARED(int64_t, maxima, kThreads);
  maxima[threadIdx.x] = largest;
  Barrier();
  largest = 0;
  for (unsigned thread = 0; thread < threadIdx.x; ++thread)
    largest = maxima[thread] > largest ? maxima[thread] : largest;
  for (int64_t group = first; group < first + kEach && group < params.groups; ++group) {
    const int64_t end = given(group);
    largest = end > largest ? end : largest;
    params.ends[group] = largest < params.rows ? largest : params.rows;
  }
}

template <class T, int kVec>
__device__ void AddRow(const Pack<T, kVec>& row, float (&sum)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] += Widen(row.values[i]);
}

// The sum of rows [begin, end) of columns from `column` on, eight rows in flight.
template <class T, int kVec>
__device__ void SumRows(const Params<T>& params, int64_t begin, int64_t end, int64_t column, float (&sum)[kVec]) {
  constexpr int kInFlight = 8;
  const T* data = params.grad_y + begin * params.columns + column;
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] = 0;
  int64_t row = begin;
  for (; row + kInFlight <= end; row += kInFlight) {
    Pack<T, kVec> rows[kInFlight];
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) rows[r] = LoadOnce<Pack<T, kVec>>(data + r * params.columns);
    data += kInFlight * params.columns;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      float eight[kInFlight];
#pragma unroll
      for (int r = 0; r < kInFlight; ++r) eight[r] = Widen(rows[r].values[i]);
      sum[i] += ((eight[0] + eight[1]) + (eight[2] + eight[3])) + ((eight[4] + eight[5]) + (eight[6] + eight[7]));
    }
  }
  for (; row < end; ++row, data += params.columns) AddRow(LoadOnce<Pack<T, kVec>>(data), sum);
}

template <class T, int kVec>
__global__ void __launch_bounds__(kThreads) SumChunks(const __grid_constant__ Params<T> params) {
  const int64_t vectors = params.columns / kVec;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t task = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; task < params.chunks * vectors;
       task += stride) {
    const int64_t chunk = task / vectors;
    const int64_t column = (task - chunk * vectors) * kVec;
    const int64_t chunk_begin = chunk * params.chunk_rows;
    const int64_t chunk_end =
        chunk_begin + params.chunk_rows < params.rows ? chunk_begin + params.chunk_rows : params.rows;
    int64_t row = chunk_begin;
    for (int64_t group = GroupOf(params, row); row < chunk_end && group < params.groups; ++group) {
      const int64_t group_end = EndOf(params, group);
      const int64_t end = group_end < chunk_end ? group_end : chunk_end;
      if (end == row) continue;
      float sum[kVec];
      SumRows<T, kVec>(params, row, end, column, sum);
      if (BeginOf(params, group) >= chunk_begin && group_end <= chunk_end) {
        Pack<T, kVec> out;
#pragma unroll
        for (int i = 0; i < kVec; ++i) out.values[i] = Narrow<T>(sum[i]);
        StoreOnce(params.out + group * params.columns + column, out);
      } else {
        float* partial = PartialOf(params, chunk, group_end <= chunk_end) + column;
#pragma unroll
        for (int i = 0; i < kVec; ++i) partial[i] = sum[i];
      }
      row = end;
    }
  }
}

// Groups that cross chunks, and empty ones. A block takes a panel of columns and strides over the groups; neighbouring
// threads take neighbouring columns, and the threads of a column stride over the chunks.
template <class T>
__global__ void __launch_bounds__(kThreads)
    AddPartials(const __grid_constant__ Params<T> params, int64_t panels, int64_t slices) {
  constexpr int kTurns = kThreads / kColumnsPerBlock;
  GRADFUSE_SHARED(double, sums, kThreads);
  const int turn = static_cast<int>(threadIdx.x) / kColumnsPerBlock;
  for (int64_t task = blockIdx.x; task < panels * slices; task += gridDim.x) {
    const int64_t slice = task / panels;
    const int64_t column =
        (task - slice * panels) * kColumnsPerBlock + static_cast<int>(threadIdx.x) % kColumnsPerBlock;
    const bool has_column = column < params.columns;
    for (int64_t group = slice; group < params.groups; group += slices) {
      const int64_t begin = BeginOf(params, group);
      const int64_t end = EndOf(params, group);
      if (begin >= end) {
        if (turn == 0 && has_column) params.out[group * params.columns + column] = Narrow<T>(0.0f);
        continue;
      }
      const int64_t first = begin / params.chunk_rows;
      const int64_t last = (end - 1) / params.chunk_rows;
      if (first == last) continue;
      double sum = 0;
      if (has_column) {
#pragma unroll 8
        for (int64_t chunk = first + turn; chunk <= last; chunk += kTurns) {
          sum += PartialOf(params, chunk, chunk == last)[column];
        }
      }
      sums[threadIdx.x] = sum;
      Barrier();
      if (turn == 0 && has_column) {
#pragma unroll
        for (int other = 1; other < kTurns; ++other) sum += sums[threadIdx.x + other * kColumnsPerBlock];
        params.out[group * params.columns + column] = Narrow<T>(static_cast<float>(sum));
      }
      Barrier();
    }
  }
}

// Rows in a chunk: many, so that partial sums are few, but few enough to keep a large device busy. By the shape alone,
// as the order of sums depends on it.
int64_t ChunkRows(int64_t rows, int64_t columns) {
  constexpr int64_t kFewest = 16;
  constexpr int64_t kMost = 128;
  constexpr int64_t kElementsInFlight = int64_t{1} << 20;
  int64_t chunk_rows = kMost;
  while (chunk_rows > kFewest && CeilDiv(rows, chunk_rows) * columns < kElementsInFlight) chunk_rows /= 2;
  return chunk_rows;
}

template <class T>
Params<T> ParamsOf(const GroupedBiasAddGradArgs& args, Workspace& workspace) {
  Params<T> params{};
  const Shape& shape = args.grad_y.shape;
  params.grad_y = args.grad_y.Data<T>();
  params.out = args.grad_bias.MutableData<T>();
  if (args.group_idx) {
    params.group_idx = args.group_idx->data;
    params.is_int32 = args.group_idx->dtype == DType::kInt32;
    params.groups = args.group_idx->shape[0];
    params.rows = shape[0];
    params.columns = shape[1];
  } else {
    params.groups = shape[0];
    params.group_size = shape[1];
    params.rows = shape[0] * shape[1];
    params.columns = shape[2];
  }
  params.chunk_rows = ChunkRows(params.rows, params.columns);
  params.chunks = CeilDiv(params.rows, params.chunk_rows);
  int64_t* ends = workspace.Array<int64_t>(args.group_idx ? params.groups : 0);
  params.ends = args.group_idx ? ends : nullptr;
  params.partials = workspace.Array<float>(2 * params.chunks * params.columns);
  return params;
}

template <class T, int kVec>
Status StartSums(const Params<T>& params, const Queue& queue) {
  const int64_t threads = params.chunks * (params.columns / kVec);
  return Launch(queue, SumChunks<T, kVec>, CeilDiv(threads, kThreads), kThreads, params);
}

template <class T>
Status RunTyped(const GroupedBiasAddGradArgs& args, const Queue& queue) {
  Workspace workspace(queue.workspace);
  Params<T> params = ParamsOf<T>(args, workspace);
  params.fault = queue.fault;
  if (params.groups == 0) return {};
  if (params.ends != nullptr) GRADFUSE_RETURN_IF_ERROR(Launch(queue, FillEnds<T>, 1, kThreads, params));
  if (params.columns == 0) return {};
  const bool aligned = IsAligned(params.grad_y) && IsAligned(params.out);
  if (aligned && params.columns % kWidest<T> == 0) {
    GRADFUSE_RETURN_IF_ERROR((StartSums<T, kWidest<T>>(params, queue)));
  } else if (aligned && params.columns % 2 == 0) {
    GRADFUSE_RETURN_IF_ERROR((StartSums<T, 2>(params, queue)));
  } else {
    GRADFUSE_RETURN_IF_ERROR((StartSums<T, 1>(params, queue)));
  }
  constexpr int64_t kMostSlices = 32;  // a block of one slice looks at all groups that are its own
  const int64_t panels = CeilDiv(params.columns, kColumnsPerBlock);
  const int64_t slices = std::min(params.groups, kMostSlices);
  return Launch(queue, AddPartials<T>, panels * slices, kThreads, params, panels, slices);
}

}  // namespace

int64_t WorkspaceBytes(const GroupedBiasAddGradArgs& args) {
  Workspace workspace(nullptr);
  ParamsOf<float>(args, workspace);
  return workspace.bytes();
}

Status Run(const GroupedBiasAddGradArgs& args, const Queue& queue) {
  return WithShortFloatType(args.grad_y.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
