#include "gradfuse/ops/scaled_masked_softmax_backward.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

template <class T>
struct Params {
  const T* grad_output;
  const T* y;
  const uint8_t* mask;
  T* out;
  float scale;
  int64_t rows;
  int64_t size;  // of a row
  // Whether the tensors begin at addresses of whole vectors. Others are read element by element into the same vectors,
  // so that the sums have the same bits.
  bool aligned;
  // A mask that serves all heads is read while it is in the cache: its rows' heads follow each other.
  bool heads_last;
  Divisor heads;
  Divisor queries;
  int64_t head_count;
  int64_t query_count;
  int64_t mask_batch_stride;
  int64_t mask_head_stride;
};

// Where a row begins in the tensors, and its mask.
struct Row {
  int64_t begin;
  int64_t mask_begin;
};

template <class T>
__device__ Row RowAt(const Params<T>& params, int64_t index) {
  if (params.mask == nullptr) return {index * params.size, 0};
  int64_t batch;
  int64_t head;
  int64_t query;
  int64_t rest;
  if (params.heads_last) {
    params.heads.Divide(index, rest, head);
    params.queries.Divide(rest, batch, query);
  } else {
    params.queries.Divide(index, rest, query);
    params.heads.Divide(rest, batch, head);
  }
  const int64_t row = (batch * params.head_count + head) * params.query_count + query;
  return {row * params.size, batch * params.mask_batch_stride + head * params.mask_head_stride + query * params.size};
}

// kVec neighbouring elements, packed into words so that elements of 16 bits do not take a register each.
template <class T, int kVec>
struct alignas(sizeof(T) * kVec < 4 ? 4 : sizeof(T) * kVec) Vector {
  static constexpr int kPerWord = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  uint32_t words[CeilDiv(kVec, kPerWord)];

  __device__ float Get(int i) const {
    const uint32_t word = words[i / kPerWord] >> (i % kPerWord * 16);
    T element;
    memcpy(&element, &word, sizeof element);
    return Widen(element);
  }
  // Of a vector that is 0 there.
  __device__ void Set(int i, T element) {
    uint32_t word = 0;
    memcpy(&word, &element, sizeof element);
    words[i / kPerWord] |= word << (i % kPerWord * 16);
  }
};

// A vector of a row whose first element is at `place`; elements outside of the row, which belong to its neighbours, are
// 0 and not read.
template <class T, int kVec>
__device__ Vector<T, kVec> LoadPart(const T* row, int64_t place, int64_t size, bool aligned) {
  if (aligned && place >= 0 && place + kVec <= size) return LoadOnce<Vector<T, kVec>>(row + place);
  Vector<T, kVec> vector{};
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (place + i >= 0 && place + i < size) vector.Set(i, row[place + i]);
  }
  return vector;
}

// The same of a mask, as bits, the first element's lowest. It may be aligned in another way, and other rows read it
// too.
template <int kVec>
__device__ uint32_t LoadMask(const uint8_t* row, int64_t place, int64_t size) {
  const uint8_t* address = row + place;
  const bool whole = place >= 0 && place + kVec <= size && reinterpret_cast<uintptr_t>(address) % kVec == 0;
  Pack<uint8_t, kVec> pack{};
  if (whole) pack = *reinterpret_cast<const Pack<uint8_t, kVec>*>(address);
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const bool inside = place + i >= 0 && place + i < size;
    const uint8_t masked = whole || !inside ? pack.values[i] : row[place + i];
    bits |= masked != 0 ? 1u << i : 0u;
  }
  return bits;
}

template <class T, int kVec>
__device__ void StorePart(T* row, int64_t place, int64_t size, bool aligned, const Pack<T, kVec>& pack) {
  if (aligned && place >= 0 && place + kVec <= size) {
    StoreOnce(row + place, pack);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (place + i >= 0 && place + i < size) row[place + i] = pack.values[i];
  }
}

template <class T, int kVec>
__device__ float Dot(const Vector<T, kVec>& grad, const Vector<T, kVec>& y) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum += grad.Get(i) * y.Get(i);
  return sum;
}

template <class T, int kVec>
__device__ Pack<T, kVec> Gradient(const Vector<T, kVec>& grad, const Vector<T, kVec>& y, uint32_t mask, float r,
                                  float scale) {
  Pack<T, kVec> out;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float value = scale * y.Get(i) * (grad.Get(i) - r);
    out.values[i] = Narrow<T>((mask >> i & 1u) != 0 ? 0.0f : value);
  }
  return out;
}

constexpr int kThreads = 128;

// A row to kLanes threads, which read it once and hold it: kPacks aligned vectors each.
template <class T, int kLanes, int kPacks>
constexpr int kThreadsFor = kLanes > kThreads ? kLanes : kThreads;

// So many threads are to fit into a multiprocessor that the compiler widens elements of 16 bits twice, rather than hold
// them in float.
constexpr int kResidentThreads = 512;

template <class T, int kLanes, int kPacks>
__global__ void __launch_bounds__((kThreadsFor<T, kLanes, kPacks>), (kResidentThreads / kThreadsFor<T, kLanes, kPacks>))
    HeldRows(const __grid_constant__ Params<T> params) {
  constexpr int kVec = kWidest<T>;
  constexpr int kRows = kThreadsFor<T, kLanes, kPacks> / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int64_t tile = blockIdx.x; tile * kRows < params.rows; tile += gridDim.x) {
    const int64_t index = tile * kRows + static_cast<int>(threadIdx.x) / kLanes;
    // Past the last row threads still take part in the sums.
    const int64_t size = index < params.rows ? params.size : 0;
    const Row row = RowAt(params, index < params.rows ? index : 0);
    const int64_t lead = row.begin % kVec;
    Vector<T, kVec> grad[kPacks];
    Vector<T, kVec> y[kPacks];
    uint32_t mask[kPacks] = {};
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int64_t place = (lane + k * kLanes) * kVec - lead;
      grad[k] = LoadPart<T, kVec>(params.grad_output + row.begin, place, size, params.aligned);
      y[k] = LoadPart<T, kVec>(params.y + row.begin, place, size, params.aligned);
    }
    if (params.mask != nullptr) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        mask[k] = LoadMask<kVec>(params.mask + row.mask_begin, (lane + k * kLanes) * kVec - lead, size);
      }
    }
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) sum += Dot(grad[k], y[k]);
    float r;
    if constexpr (kLanes <= kWarp) {
      r = SumOverLanes<kLanes>(sum);
    } else {
      r = SumOverBlock<kLanes>(sum);
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int64_t place = (lane + k * kLanes) * kVec - lead;
      StorePart(params.out + row.begin, place, size, params.aligned, Gradient(grad[k], y[k], mask[k], r, params.scale));
    }
  }
}

constexpr int kLongThreads = 512;

// A row to a block, which reads it twice, the second time out of the cache; for rows too long to hold.
template <class T>
__global__ void __launch_bounds__(kLongThreads) LongRows(const __grid_constant__ Params<T> params) {
  constexpr int kVec = kWidest<T>;
  for (int64_t index = blockIdx.x; index < params.rows; index += gridDim.x) {
    const Row row = RowAt(params, index);
    const T* grad = params.grad_output + row.begin;
    const T* y = params.y + row.begin;
    const int64_t first = static_cast<int64_t>(threadIdx.x) * kVec - row.begin % kVec;
    // In double, so that the error does not grow with the row.
    double sum = 0;
#pragma unroll 4
    for (int64_t place = first; place < params.size; place += kLongThreads * kVec) {
      sum += Dot(LoadPart<T, kVec>(grad, place, params.size, params.aligned),
                 LoadPart<T, kVec>(y, place, params.size, params.aligned));
    }
    const float r = static_cast<float>(SumOverBlock<kLongThreads>(sum));
#pragma unroll 2
    for (int64_t place = first; place < params.size; place += kLongThreads * kVec) {
      uint32_t mask = 0;
      if (params.mask != nullptr) mask = LoadMask<kVec>(params.mask + row.mask_begin, place, params.size);
      StorePart(params.out + row.begin, place, params.size, params.aligned,
                Gradient(LoadPart<T, kVec>(grad, place, params.size, params.aligned),
                         LoadPart<T, kVec>(y, place, params.size, params.aligned), mask, r, params.scale));
    }
  }
}

template <class T, int kLanes, int kPacks>
Status StartHeld(const Params<T>& params, const Queue& queue) {
  constexpr int kBlock = kThreadsFor<T, kLanes, kPacks>;
  return Launch(queue, HeldRows<T, kLanes, kPacks>, CeilDiv(params.rows, kBlock / kLanes), kBlock, params);
}

template <class T>
Status RunTyped(const ScaledMaskedSoftmaxBackwardArgs& args, const Queue& queue) {
  const Shape& shape = args.grad_output.shape;
  Params<T> params{};
  params.grad_output = args.grad_output.Data<T>();
  params.y = args.y.Data<T>();
  params.out = args.grad_input.MutableData<T>();
  params.scale = args.scale;
  params.head_count = shape[1];
  params.query_count = shape[2];
  params.size = shape[3];
  params.rows = shape[0] * shape[1] * shape[2];
  if (params.rows == 0 || params.size == 0) return {};
  params.heads = Divisor(params.head_count);
  params.queries = Divisor(params.query_count);
  if (args.mask) {
    params.mask = args.mask->Data<uint8_t>();
    params.mask_batch_stride = args.mask->shape[0] != 1 ? args.mask->strides[0] : 0;
    params.mask_head_stride = args.mask->shape[1] != 1 ? args.mask->strides[1] : 0;
    params.heads_last = params.mask_head_stride == 0;
  }

  constexpr int kVec = kWidest<T>;
  params.aligned = IsAligned(params.grad_output) && IsAligned(params.y) && IsAligned(params.out);
  // Rows that do not fill whole vectors may begin inside one and so reach over one more.
  const int64_t vectors = CeilDiv(params.size, kVec) + (params.size % kVec != 0);
  if (vectors <= 8) return StartHeld<T, 8, 1>(params, queue);
  if (vectors <= 16) return StartHeld<T, 16, 1>(params, queue);
  if (vectors <= 32) return StartHeld<T, 32, 1>(params, queue);
  if (vectors <= 64) return StartHeld<T, 32, 2>(params, queue);
  if (vectors <= 128) return StartHeld<T, 32, 4>(params, queue);
  // Eight vectors of float fit into a thread's registers, but four of the 16-bit types.
  if constexpr (kVec == 4) {
    if (vectors <= 256) return StartHeld<T, 32, 8>(params, queue);
    if (vectors <= 512) return StartHeld<T, 128, 4>(params, queue);
    if (vectors <= 1024) return StartHeld<T, 128, 8>(params, queue);
    if (vectors <= 2048) return StartHeld<T, 256, 8>(params, queue);
  } else {
    if (vectors <= 256) return StartHeld<T, 128, 2>(params, queue);
    if (vectors <= 512) return StartHeld<T, 128, 4>(params, queue);
    if (vectors <= 1024) return StartHeld<T, 256, 4>(params, queue);
  }
  return Launch(queue, LongRows<T>, params.rows, kLongThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const ScaledMaskedSoftmaxBackwardArgs&) { return 0; }

Status Run(const ScaledMaskedSoftmaxBackwardArgs& args, const Queue& queue) {
  return WithShortFloatType(args.y.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
