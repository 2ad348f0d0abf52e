#include "gradfuse/ops/cross_entropy_loss_grad.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kParts = 64;  // of the sums over all rows and over all classes, whatever their number
constexpr int32_t kTargetPlace = 3;

constexpr int64_t kIgnored = -1;
constexpr int64_t kOutOfRange = -2;

// What the gradient of a row needs beside its log-probabilities, as in the formula at CrossEntropyLossGradArgs.
struct alignas(16) Row {
  float q;
  float s;
  int64_t label;  // or kIgnored or kOutOfRange
};

template <class T>
struct Params {
  const T* grad_loss;
  const T* log_prob;
  const int64_t* target;
  const float* weight;
  T* out;
  int64_t rows;
  int64_t classes;
  int64_t grad_stride;
  int64_t ignore_index;
  float label_smoothing;
  bool is_mean;
  bool sums_weights;
  int32_t* fault;
  // Workspace.
  double* denominators;  // (kParts,)
  double* weight_sums;   // (kParts,)
  Row* row_terms;        // (N,)
  float* weight_sum;     // ()
};

template <class T>
__device__ int64_t LabelAt(const Params<T>& params, int64_t row) {
  const int64_t label = params.target[row];
  if (label == params.ignore_index) return kIgnored;
  return label >= 0 && label < params.classes ? label : kOutOfRange;
}

template <class T>
__device__ float WeightOf(const Params<T>& params, int64_t label) {
  return params.weight != nullptr ? params.weight[label] : 1.0f;
}

// The parts of the sums that all rows share.
template <class T>
__global__ void __launch_bounds__(kThreads) SumParts(const __grid_constant__ Params<T> params) {
  for (int part = static_cast<int>(blockIdx.x); part < kParts; part += static_cast<int>(gridDim.x)) {
    const int64_t first = int64_t{part} * kThreads + threadIdx.x;
    double denominator = 0;
    for (int64_t row = first; params.is_mean && row < params.rows; row += kParts * kThreads) {
      const int64_t label = LabelAt(params, row);
      if (label >= 0) denominator += WeightOf(params, label);
    }
    double weight_sum = 0;
    for (int64_t c = first; params.sums_weights && c < params.classes; c += kParts * kThreads) {
      weight_sum += params.weight[c];
    }
    denominator = SumOverBlock<kThreads>(denominator);
    weight_sum = SumOverBlock<kThreads>(weight_sum);
    if (threadIdx.x == 0) {
      params.denominators[part] = denominator;
      params.weight_sums[part] = weight_sum;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) FillRows(const __grid_constant__ Params<T> params) {
  static_assert(kParts == 2 * kWarp);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  double denominator = 1;
  double weight_sum = static_cast<double>(params.classes);
  if (params.is_mean) {
    denominator = SumOverLanes<kWarp>(params.denominators[lane] + params.denominators[lane + kWarp]);
  }
  if (params.sums_weights) {
    weight_sum = SumOverLanes<kWarp>(params.weight_sums[lane] + params.weight_sums[lane + kWarp]);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.weight_sum = static_cast<float>(weight_sum);
  const double smoothing = params.label_smoothing;
  const double q = (1 - smoothing) / denominator;
  const double s = smoothing / (denominator * static_cast<double>(params.classes));
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < params.rows; row += stride) {
    Row terms{0, 0, LabelAt(params, row)};
    if (terms.label >= 0) {
      const double g = Widen(params.grad_loss[row * params.grad_stride]);
      terms.q = static_cast<float>(q * g * WeightOf(params, terms.label));
      terms.s = smoothing != 0 ? static_cast<float>(s * g) : 0.0f;
    } else if (terms.label == kOutOfRange) {
      SetFault(params.fault, kTargetPlace);
    }
    params.row_terms[row] = terms;
  }
}

// One element, of class c.
template <class T>
__device__ float GradientAt(const Params<T>& params, const Row& row, float weight_sum, float x, int64_t c) {
  if (row.label < 0) return row.label == kIgnored ? 0.0f : NotANumber<float>();
  if (c == row.label) {
    // exp(x) - 1 would cancel where the label is likely.
    const float spread = row.s != 0 ? row.s * (Exp(x) * weight_sum - WeightOf(params, c)) : 0.0f;
    return row.q * expm1f(x) + spread;
  }
  const float shift = row.s != 0 ? row.s * WeightOf(params, c) : 0.0f;
  return Exp(x) * (row.q + row.s * weight_sum) - shift;
}

// kVec elements of one row, of classes c and after.
template <class T, int kVec>
__device__ Pack<T, kVec> GradientOfRow(const Params<T>& params, const Row& row, float weight_sum,
                                       const Pack<T, kVec>& log_prob, int64_t c) {
  Pack<T, kVec> out;
  if (row.label < 0) {
    const T value = Narrow<T>(row.label == kIgnored ? 0.0f : NotANumber<float>());
#pragma unroll
    for (int i = 0; i < kVec; ++i) out.values[i] = value;
    return out;
  }
  const float scale = row.q + row.s * weight_sum;
  if (params.weight != nullptr && row.s != 0) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      out.values[i] = Narrow<T>(Exp(Widen(log_prob.values[i])) * scale - row.s * params.weight[c + i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out.values[i] = Narrow<T>(Exp(Widen(log_prob.values[i])) * scale - row.s);
  }
  const int64_t place = row.label - c;
  if (place >= 0 && place < kVec) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (i == place) {
        out.values[i] = Narrow<T>(GradientAt(params, row, weight_sum, Widen(log_prob.values[i]), row.label));
      }
    }
  }
  return out;
}

// All elements as one stream of aligned vectors, whatever the number of classes; a vector that rows meet in is computed
// element by element.
template <class T, int kVec>
__global__ void __launch_bounds__(kThreads) Gradient(const __grid_constant__ Params<T> params) {
  constexpr int kTile = kThreads * kUnroll * kVec;
  const int64_t total = params.rows * params.classes;
  const float weight_sum = *params.weight_sum;
  for (int64_t tile = blockIdx.x; tile * kTile < total; tile += gridDim.x) {
    const int64_t begin = tile * kTile;
    // One division for the tile; within it places are 32-bit numbers.
    const int64_t first_row = begin / params.classes;
    const int64_t first_class = begin - first_row * params.classes;
    const int in_first_row =
        static_cast<int>(params.classes - first_class < kTile ? params.classes - first_class : kTile);
    const unsigned classes = static_cast<unsigned>(params.classes < kTile ? params.classes : kTile);
    const auto row_of = [&](int place) {
      if (place < in_first_row) return first_row;
      return first_row + 1 + static_cast<int64_t>(static_cast<unsigned>(place - in_first_row) / classes);
    };

    Row rows[kUnroll];
    int64_t c[kUnroll];
    Pack<T, kVec> log_prob[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int place = (u * kThreads + static_cast<int>(threadIdx.x)) * kVec;
      const int64_t index = begin + place;
      if (index >= total) break;
      const int64_t row = row_of(place);
      c[u] = index - row * params.classes;
      rows[u] = params.row_terms[row];
      // Of an ignored row nothing is read.
      if (index + kVec <= total && (rows[u].label >= 0 || c[u] + kVec > params.classes)) {
        log_prob[u] = LoadOnce<Pack<T, kVec>>(params.log_prob + index);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int place = (u * kThreads + static_cast<int>(threadIdx.x)) * kVec;
      const int64_t index = begin + place;
      if (index >= total) break;
      if (index + kVec <= total && c[u] + kVec <= params.classes) {
        StoreOnce(params.out + index, GradientOfRow(params, rows[u], weight_sum, log_prob[u], c[u]));
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < kVec && index + i < total; ++i) {
        const int64_t row = row_of(place + i);
        params.out[index + i] =
            Narrow<T>(GradientAt(params, params.row_terms[row], weight_sum, Widen(params.log_prob[index + i]),
                                 index + i - row * params.classes));
      }
    }
  }
}

template <class T>
Params<T> ParamsOf(const CrossEntropyLossGradArgs& args, Workspace& workspace) {
  Params<T> params{};
  params.grad_loss = args.grad_loss.Data<T>();
  params.log_prob = args.log_prob.Data<T>();
  params.target = args.target.Data<int64_t>();
  params.weight = args.weight ? args.weight->Data<float>() : nullptr;
  params.out = args.grad_input.MutableData<T>();
  params.rows = args.log_prob.shape[0];
  params.classes = args.log_prob.shape[1];
  params.grad_stride = args.reduction == "none" ? 1 : 0;
  params.ignore_index = args.ignore_index;
  params.label_smoothing = args.label_smoothing;
  params.is_mean = args.reduction == "mean";
  params.sums_weights = args.weight && args.label_smoothing != 0;
  params.denominators = workspace.Array<double>(kParts);
  params.weight_sums = workspace.Array<double>(kParts);
  params.row_terms = workspace.Array<Row>(params.rows);
  params.weight_sum = workspace.Array<float>(1);
  return params;
}

template <class T>
Status RunTyped(const CrossEntropyLossGradArgs& args, const Queue& queue) {
  Workspace workspace(queue.workspace);
  Params<T> params = ParamsOf<T>(args, workspace);
  params.fault = queue.fault;
  const int64_t total = params.rows * params.classes;
  if (total == 0) return {};
  if (params.is_mean || params.sums_weights) {
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, SumParts<T>, kParts, kThreads, params));
  }
  constexpr int64_t kMaxRowBlocks = 1024;  // each of them adds up the parts again
  const int64_t row_blocks = std::min(CeilDiv(params.rows, kThreads), kMaxRowBlocks);
  GRADFUSE_RETURN_IF_ERROR(Launch(queue, FillRows<T>, row_blocks, kThreads, params));
  constexpr int64_t kVectors = kThreads * kUnroll;
  if (IsAligned(params.log_prob) && IsAligned(params.out)) {
    return Launch(queue, Gradient<T, kWidest<T>>, CeilDiv(total, kVectors * kWidest<T>), kThreads, params);
  }
  return Launch(queue, Gradient<T, 1>, CeilDiv(total, kVectors), kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const CrossEntropyLossGradArgs& args) {
  Workspace workspace(nullptr);
  ParamsOf<float>(args, workspace);
  return workspace.bytes();
}

Status Run(const CrossEntropyLossGradArgs& args, const Queue& queue) {
  return WithShortFloatType(args.log_prob.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
