#include "gradfuse/loops.h"
#include "gradfuse/ops/mse_loss_backward.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kOperands = 3;  // grad_output, self, target
constexpr int kThreads = 256;
// Vectors that a thread has in flight of each operand.
template <bool kMaps>
constexpr int kUnroll = kMaps ? 1 : 4;

// How an operand's elements lie under those of the output.
enum class Layout : int32_t {
  kSame,      // one for one
  kConstant,  // one element for all
  kMapped     // by strides
};

template <class T>
struct Params {
  const T* operands[kOperands];
  Layout layouts[kOperands];
  T* out;
  float factor;
  int64_t total;
  // The broadcast, for mapped operands; the strides of the last loop are 0 or 1.
  Loops<kOperands> loops;
  Divisor divisors[kMaxRank];  // of the loops' sizes
};

// The offset of an operand at output element `index`, and the element's place along the last dimension.
template <class T>
__device__ __attribute__((noinline)) int64_t OffsetAt(const Params<T>& params, int operand, int64_t index,
                                                      int64_t& place) {
  int64_t offset = 0;
  for (int axis = params.loops.rank - 1; axis >= 0; --axis) {
    int64_t position;
    if (axis == 0) {
      position = index;
    } else {
      params.divisors[axis].Divide(index, index, position);
    }
    offset += position * params.loops.strides[axis][operand];
    if (axis == params.loops.rank - 1) place = position;
  }
  return offset;
}

// kVec neighbours of an operand under output elements from `index` on; those past the end are not read.
template <class T, int kVec, bool kMaps>
__device__ Pack<T, kVec> LoadOperand(const Params<T>& params, int operand, int64_t index) {
  Pack<T, kVec> pack{};
  const T* data = params.operands[operand];
  const bool whole = index + kVec <= params.total;
  if (params.layouts[operand] == Layout::kConstant) {
    const T value = *data;
#pragma unroll
    for (int i = 0; i < kVec; ++i) pack.values[i] = value;
    return pack;
  }
  if (!kMaps || params.layouts[operand] == Layout::kSame) {
    if (whole) return LoadOnce<Pack<T, kVec>>(data + index);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (index + i < params.total) pack.values[i] = data[index + i];
    }
    return pack;
  }
  int64_t place;
  const int64_t offset = OffsetAt(params, operand, index, place);
  const int last = params.loops.rank - 1;
  if (whole && place + kVec <= params.loops.sizes[last]) {
    const int64_t stride = params.loops.strides[last][operand];
#pragma unroll
    for (int i = 0; i < kVec; ++i) pack.values[i] = data[offset + i * stride];
    return pack;
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (index + i < params.total) pack.values[i] = data[OffsetAt(params, operand, index + i, place)];
  }
  return pack;
}

template <class T, int kVec, bool kMaps>
__global__ void __launch_bounds__(kThreads) Gradient(const __grid_constant__ Params<T> params) {
  constexpr int64_t kTile = int64_t{kThreads} * kUnroll<kMaps> * kVec;
  for (int64_t tile = blockIdx.x; tile * kTile < params.total; tile += gridDim.x) {
    const int64_t first = tile * kTile + int64_t{threadIdx.x} * kVec;
    Pack<T, kVec> operands[kUnroll<kMaps>][kOperands] = {};
#pragma unroll
    for (int u = 0; u < kUnroll<kMaps>; ++u) {
      const int64_t index = first + u * kThreads * kVec;
      if (index >= params.total) break;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) operands[u][k] = LoadOperand<T, kVec, kMaps>(params, k, index);
    }
#pragma unroll
    for (int u = 0; u < kUnroll<kMaps>; ++u) {
      const int64_t index = first + u * kThreads * kVec;
      if (index >= params.total) break;
      Pack<T, kVec> out;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float difference = Widen(operands[u][1].values[i]) - Widen(operands[u][2].values[i]);
        out.values[i] = Narrow<T>(params.factor * difference * Widen(operands[u][0].values[i]));
      }
      if (index + kVec <= params.total) {
        StoreOnce(params.out + index, out);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (index + i < params.total) params.out[index + i] = out.values[i];
        }
      }
    }
  }
}

template <class T, int kVec, bool kMaps>
Status Start(const Params<T>& params, const Queue& queue) {
  constexpr int64_t kTile = int64_t{kThreads} * kUnroll<kMaps> * kVec;
  return Launch(queue, Gradient<T, kVec, kMaps>, CeilDiv(params.total, kTile), kThreads, params);
}

template <class T>
void SetLoops(const MseLossBackwardArgs& args, Params<T>& params) {
  const TensorLayout* const operands[kOperands] = {&args.grad_output, &args.self, &args.target};
  params.loops = Loops<kOperands>(args.grad_input.shape, operands);
  for (int axis = 0; axis < params.loops.rank; ++axis) params.divisors[axis] = Divisor(params.loops.sizes[axis]);
  for (int k = 0; k < kOperands; ++k) {
    const bool same = operands[k]->NumElements() == params.total;
    params.layouts[k] = same ? Layout::kSame : operands[k]->NumElements() == 1 ? Layout::kConstant : Layout::kMapped;
  }
}

template <class T>
Status RunTyped(const MseLossBackwardArgs& args, const Queue& queue) {
  Params<T> params{};
  params.total = args.grad_input.NumElements();
  if (params.total == 0) return {};
  params.operands[0] = args.grad_output.Data<T>();
  params.operands[1] = args.self.Data<T>();
  params.operands[2] = args.target.Data<T>();
  params.out = args.grad_input.MutableData<T>();
  const double divisor =
      args.reduction == MseLossBackwardArgs::kMean ? static_cast<double>(args.self.NumElements()) : 1;
  params.factor = static_cast<float>(2 / divisor);
  SetLoops(args, params);

  bool aligned = IsAligned(params.out);
  bool maps = false;
  for (int k = 0; k < kOperands; ++k) {
    aligned = aligned && (params.layouts[k] != Layout::kSame || IsAligned(params.operands[k]));
    maps = maps || params.layouts[k] == Layout::kMapped;
  }
  if (maps) return aligned ? Start<T, kWidest<T>, true>(params, queue) : Start<T, 1, true>(params, queue);
  return aligned ? Start<T, kWidest<T>, false>(params, queue) : Start<T, 1, false>(params, queue);
}

}  // namespace

int64_t WorkspaceBytes(const MseLossBackwardArgs&) { return 0; }

Status Run(const MseLossBackwardArgs& args, const Queue& queue) {
  return WithShortFloatType(args.self.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
