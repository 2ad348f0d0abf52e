#include "gradfuse/ops/linear_cross_entropy.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAddedTogether = 64;  // terms that a thread adds up before they are in double
constexpr int64_t kMostBlocks = 1024;
constexpr int32_t kTargetPlace = 3;

constexpr int64_t kIgnored = -1;
constexpr int64_t kOutOfRange = -2;

// What all rows share, as in the formulas at LinearCrossEntropyArgs.
struct Totals {
  double denominator;
  double weight_sum;
};

// What the gradients of a row's logits need beside them: exp(logit - max) scale - shift weight, and that of its label.
template <class Real>
struct Row {
  Real max;
  Real scale;
  Real shift;
  Real at_target;
  int64_t label;  // or kIgnored or kOutOfRange
};

template <class T>
struct Params {
  using Real = ComputeType<T>;

  const T* input;
  const T* linear_weight;
  const int64_t* target;
  const T* linear_bias;  // these four: or null
  const Real* weight;
  const T* grad_loss;
  const T* grad_logsumexp;
  T* loss;  // these five: or null
  T* grad_input;
  T* grad_weight;
  T* grad_bias;
  T* logsumexp;
  int64_t rows;
  int64_t features;
  int64_t classes;
  int64_t grad_stride;
  int64_t ignore_index;
  double label_smoothing;
  Real softcap;
  bool is_mean;
  bool is_none;
  bool takes_all_rows;
  int32_t* fault;
  // Workspace.
  Totals* totals;
  Row<Real>* row_terms;  // (N,)
  double* losses;        // (N,)
  Real* sums;            // (kMostBlocks, H)
};

template <class T>
__device__ int64_t LabelAt(const Params<T>& params, int64_t row) {
  const int64_t label = params.target[row];
  if (label == params.ignore_index) return kIgnored;
  return label >= 0 && label < params.classes ? label : kOutOfRange;
}

template <class T>
__device__ ComputeType<T> WeightOf(const Params<T>& params, int64_t c) {
  return params.weight != nullptr ? params.weight[c] : ComputeType<T>{1};
}

__device__ inline float TanhOf(float x) { return tanhf(x); }
__device__ inline double TanhOf(double x) { return tanh(x); }

template <class T>
__device__ ComputeType<T> LogitAt(const Params<T>& params, int64_t row, int64_t c) {
  using Real = ComputeType<T>;
  const T* input = params.input + row * params.features;
  const T* weight = params.linear_weight + c * params.features;
  double total = params.linear_bias != nullptr ? Widen(params.linear_bias[c]) : Real{0};
  for (int64_t begin = 0; begin < params.features; begin += kAddedTogether) {
    Real sum = 0;
    for (int64_t i = begin; i < params.features && i < begin + kAddedTogether; ++i) {
      sum += Widen(input[i]) * Widen(weight[i]);
    }
    total += sum;
  }
  const auto logit = static_cast<Real>(total);
  return params.softcap != 0 ? params.softcap * TanhOf(logit / params.softcap) : logit;
}

template <class T>
__device__ ComputeType<T> GradientAt(const Params<T>& params, int64_t row, int64_t c) {
  using Real = ComputeType<T>;
  const Row<Real>& terms = params.row_terms[row];
  if (terms.label == kOutOfRange) return NotANumber<Real>();
  if (terms.label == kIgnored && !params.takes_all_rows) return Real{0};
  if (terms.label == c) return terms.at_target;
  const Real logit = LogitAt(params, row, c);
  const Real grad = Exp(logit - terms.max) * terms.scale - terms.shift * WeightOf(params, c);
  if (params.softcap == 0) return grad;
  const Real capped = logit / params.softcap;
  return grad * (1 - capped * capped);
}

// One block has the sums that all rows share.
template <class T>
__global__ void __launch_bounds__(kThreads) AddTotals(const __grid_constant__ Params<T> params) {
  double denominator = 0;
  for (int64_t row = threadIdx.x; params.is_mean && row < params.rows; row += kThreads) {
    const int64_t label = LabelAt(params, row);
    if (label >= 0) denominator += WeightOf(params, label);
  }
  double weight_sum = 0;
  for (int64_t c = threadIdx.x; c < params.classes; c += kThreads) weight_sum += WeightOf(params, c);
  denominator = SumOverBlock<kThreads>(denominator);
  weight_sum = SumOverBlock<kThreads>(weight_sum);
  if (threadIdx.x == 0) *params.totals = {params.is_mean ? denominator : 1.0, weight_sum};
}

// A block of threads has a row: its loss, and what its gradients need.
template <class T>
__global__ void __launch_bounds__(kThreads) OfRows(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  GRADFUSE_SHARED(Real, maxima, kThreads);
  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const int64_t label = LabelAt(params, row);
    if (label == kOutOfRange || (label == kIgnored && !params.takes_all_rows)) {
      if (threadIdx.x == 0) {
        params.row_terms[row] = {0, 0, 0, 0, label};
        params.losses[row] = label == kIgnored ? 0.0 : NotANumber<double>();
        if (params.logsumexp != nullptr) params.logsumexp[row] = Narrow<T>(NotANumber<Real>());
        if (label == kOutOfRange) SetFault(params.fault, kTargetPlace);
      }
      continue;
    }
    Real max = Never<Real>();
    double sum = 0;
    double weighted = 0;
    for (int64_t c = threadIdx.x; c < params.classes; c += kThreads) {
      const Real logit = LogitAt(params, row, c);
      if (logit > max) {
        sum *= Exp(static_cast<double>(max) - logit);
        max = logit;
      }
      // Classes that a bias excludes have logits of -inf.
      if (logit != Never<Real>()) sum += Exp(logit - max);
      weighted += static_cast<double>(logit) * WeightOf(params, c);
    }
    maxima[threadIdx.x] = max;
    Barrier();
    Real largest = maxima[0];
    for (int thread = 1; thread < kThreads; ++thread) {
      if (maxima[thread] > largest) largest = maxima[thread];
    }
    Barrier();
    sum = max == Never<Real>() ? sum : sum * Exp(static_cast<double>(max) - largest);
    sum = SumOverBlock<kThreads>(sum);
    weighted = SumOverBlock<kThreads>(weighted);
    if (threadIdx.x != 0) continue;
    const double log_sum = Log(sum);
    if (params.logsumexp != nullptr) params.logsumexp[row] = Narrow<T>(static_cast<Real>(largest + log_sum));
    const double h = params.grad_logsumexp != nullptr ? Widen(params.grad_logsumexp[row]) : Real{0};
    if (label == kIgnored) {
      params.row_terms[row] = {largest, static_cast<Real>(h / sum), 0, 0, label};
      params.losses[row] = 0;
      continue;
    }
    const Totals totals = *params.totals;
    const double smoothing = params.label_smoothing;
    const Real target_logit = LogitAt(params, row, label);
    const double log_prob = static_cast<double>(target_logit) - largest - log_sum;
    const double label_weight = WeightOf(params, label);
    double loss = -(1 - smoothing) * label_weight * log_prob;
    const auto classes = static_cast<double>(params.classes);
    if (smoothing != 0) loss += smoothing / classes * (totals.weight_sum * (largest + log_sum) - weighted);
    params.losses[row] = loss;
    const double g = params.grad_loss != nullptr ? Widen(params.grad_loss[row * params.grad_stride]) : Real{1};
    const double q = g * (1 - smoothing) * label_weight / totals.denominator;
    const double s = smoothing != 0 ? g * smoothing / (classes * totals.denominator) : 0.0;
    // exp(log_prob) - 1 would cancel where the label is likely.
    double at_target = q * expm1(log_prob) + h * Exp(log_prob);
    double scale = q + h;
    if (smoothing != 0) {
      at_target += s * (Exp(log_prob) * totals.weight_sum - label_weight);
      scale += s * totals.weight_sum;
    }
    if (params.softcap != 0) {
      const double capped = static_cast<double>(target_logit) / params.softcap;
      at_target *= 1 - capped * capped;
    }
    params.row_terms[row] = {largest, static_cast<Real>(scale / sum), static_cast<Real>(s),
                             static_cast<Real>(at_target), label};
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) WriteLoss(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  double total = 0;
  for (int64_t row = threadIdx.x; row < params.rows; row += kThreads) {
    if (params.is_none) params.loss[row] = Narrow<T>(static_cast<Real>(params.losses[row]));
    total += params.losses[row];
  }
  total = SumOverBlock<kThreads>(total);
  if (threadIdx.x == 0 && !params.is_none) {
    *params.loss = Narrow<T>(static_cast<Real>(total / params.totals->denominator));
  }
}

// A block of threads has a row of `out`: the sum of the `count` rows of `other`, times their gradients. With of_input
// the row is one of the input, else a class. Adds up the gradients too, where out_sum is not null.
template <class T>
__global__ void __launch_bounds__(kThreads) AddProducts(const __grid_constant__ Params<T> params, bool of_input,
                                                        int64_t count, const T* other, T* out, T* out_sum) {
  using Real = ComputeType<T>;
  GRADFUSE_SHARED(Real, gradients, kThreads);
  Real* const sums = params.sums + blockIdx.x * params.features;
  const int64_t lines = of_input ? params.rows : params.classes;
  for (int64_t line = blockIdx.x; line < lines; line += gridDim.x) {
    for (int64_t i = threadIdx.x; i < params.features; i += kThreads) sums[i] = 0;
    double total = 0;
    for (int64_t begin = 0; begin < count; begin += kThreads) {
      const int64_t own = begin + threadIdx.x;
      Real gradient = 0;
      if (own < count) gradient = of_input ? GradientAt(params, line, own) : GradientAt(params, own, line);
      gradients[threadIdx.x] = gradient;
      total += gradient;
      Barrier();
      const int there = static_cast<int>(count - begin < kThreads ? count - begin : kThreads);
      for (int64_t i = threadIdx.x; i < params.features; i += kThreads) {
        Real sum = 0;
        for (int place = 0; place < there; ++place) {
          // What lies in rows that do not count may be anything.
          const Real factor = gradients[place];
          if (factor != 0) sum += factor * Widen(other[(begin + place) * params.features + i]);
        }
        sums[i] += sum;
      }
      Barrier();
    }
    if (out != nullptr) {
      for (int64_t i = threadIdx.x; i < params.features; i += kThreads) {
        out[line * params.features + i] = Narrow<T>(sums[i]);
      }
    }
    if (out_sum == nullptr) continue;
    total = SumOverBlock<kThreads>(total);
    if (threadIdx.x == 0) out_sum[line] = Narrow<T>(static_cast<Real>(total));
  }
}

template <class T>
Params<T> ParamsOf(const LinearCrossEntropyArgs& args, Workspace& workspace) {
  Params<T> params{};
  params.rows = args.Rows();
  params.features = args.Features();
  params.classes = args.Classes();
  params.totals = workspace.Array<Totals>(1);
  params.row_terms = workspace.Array<Row<ComputeType<T>>>(params.rows);
  params.losses = workspace.Array<double>(params.rows);
  params.sums = workspace.Array<ComputeType<T>>(kMostBlocks * params.features);
  return params;
}

template <class T>
Status RunTyped(const LinearCrossEntropyArgs& args, const Queue& queue) {
  Workspace workspace(queue.workspace);
  Params<T> params = ParamsOf<T>(args, workspace);
  params.input = args.input.Data<T>();
  params.linear_weight = args.linear_weight.Data<T>();
  params.target = args.target.Data<int64_t>();
  params.linear_bias = args.linear_bias ? args.linear_bias->Data<T>() : nullptr;
  params.weight = args.weight ? args.weight->Data<ComputeType<T>>() : nullptr;
  params.grad_loss = args.grad_loss ? args.grad_loss->Data<T>() : nullptr;
  params.grad_logsumexp = args.grad_logsumexp ? args.grad_logsumexp->Data<T>() : nullptr;
  params.loss = args.Wants(0) ? args.loss.MutableData<T>() : nullptr;
  params.grad_input = args.Wants(1) ? args.grad_input.MutableData<T>() : nullptr;
  params.grad_weight = args.Wants(2) ? args.grad_weight.MutableData<T>() : nullptr;
  params.grad_bias = args.Wants(3) ? args.grad_bias.MutableData<T>() : nullptr;
  params.logsumexp = args.Wants(4) ? args.logsumexp.MutableData<T>() : nullptr;
  params.takes_all_rows = args.TakesAllRows();
  params.is_mean = args.reduction == "mean";
  params.is_none = args.reduction == "none";
  params.grad_stride = params.is_none ? 1 : 0;
  params.ignore_index = args.ignore_index;
  params.label_smoothing = args.label_smoothing;
  params.softcap = args.softcap;
  params.fault = queue.fault;
  GRADFUSE_RETURN_IF_ERROR(Launch(queue, AddTotals<T>, 1, kThreads, params));
  GRADFUSE_RETURN_IF_ERROR(Launch(queue, OfRows<T>, params.rows, kThreads, params));
  if (params.loss != nullptr) GRADFUSE_RETURN_IF_ERROR(Launch(queue, WriteLoss<T>, 1, kThreads, params));
  T* const nothing = nullptr;
  if (params.grad_input != nullptr) {
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, AddProducts<T>, std::min(params.rows, kMostBlocks), kThreads, params, true,
                                    params.classes, params.linear_weight, params.grad_input, nothing));
  }
  if (params.grad_weight == nullptr && params.grad_bias == nullptr) return {};
  return Launch(queue, AddProducts<T>, std::min(params.classes, kMostBlocks), kThreads, params, false, params.rows,
                params.input, params.grad_weight, params.grad_bias);
}

}  // namespace

int64_t WorkspaceBytes(const LinearCrossEntropyArgs& args) {
  Workspace workspace(nullptr);
  WithFloatType(args.input.dtype, [&](auto type) { ParamsOf<decltype(type)>(args, workspace); });
  return workspace.bytes();
}

Status Run(const LinearCrossEntropyArgs& args, const Queue& queue) {
  return WithFloatType(args.input.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
