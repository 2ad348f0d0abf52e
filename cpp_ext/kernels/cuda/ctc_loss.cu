#include "gradfuse/ops/ctc_loss.h"
#include "kernels/cuda/ctc_items.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kHeld = 4;  // states whose emissions a thread loads a step ahead
constexpr int kStepsAhead = 8;
constexpr int32_t kLogProbsPlace = 1;

// Widths of which two steps fit into shared memory.
template <class Real>
constexpr int64_t kSharedWidth = (20 << 10) / (2 * sizeof(Real)) - 2;

template <class T>
struct Params {
  CtcItems items;
  const T* log_probs;
  T* neg_log_likelihood;
  T* log_alpha;
  int64_t width;
  ComputeType<T>* steps;  // workspace (N, 2, width + 2), or null where shared memory serves
};

template <class Real>
__device__ Real LogSumExp(Real a, Real b, Real c) {
  Real largest = a > b ? a : b;
  largest = c > largest ? c : largest;
  const bool never = largest == Never<Real>();
  const Real base = never ? Real(0) : largest;
  const Real sum = Exp(a - base) + Exp(b - base) + Exp(c - base);
  return never && sum == 0 ? Never<Real>() : base + Log(sum);
}

// The class of a state, and whether a path may reach it from two states before: only an odd state's label may follow
// the label before it without a blank, and only if the two differ.
struct StateLabel {
  int64_t label;
  bool jumps;
};

__device__ StateLabel LabelOf(const CtcItems& items, const int64_t* labels, int64_t state) {
  if (state % 2 == 0) return {items.blank, false};
  const int64_t index = state / 2;
  return {labels[index], index > 0 && labels[index] != labels[index - 1]};
}

// An item to a block, its states to the threads, all of them step by step.
template <class T, bool kShared>
__global__ void __launch_bounds__(kMaxThreads) Alpha(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  const CtcItems& items = params.items;
  const int64_t threads = blockDim.x;
  const int64_t thread = threadIdx.x;
  GRADFUSE_SHARED(Real, shared, (kShared ? 2 * (kSharedWidth<Real> + 2) : 1));
  for (int64_t index = blockIdx.x; index < items.items; index += gridDim.x) {
    const CtcItem item = items.item[index];
    const int64_t states = 2 * item.target_length + 1;
    const int64_t* labels = items.labels + index * items.longest;
    T* item_alpha = params.log_alpha + index * items.steps * params.width;
    if (item.is_bad != 0) {
      for (int64_t i = thread; i < items.steps * params.width; i += threads)
        item_alpha[i] = Narrow<T>(NotANumber<Real>());
      if (thread == 0) params.neg_log_likelihood[index] = Narrow<T>(NotANumber<Real>());
      continue;
    }
    Real* const memory = kShared ? shared : params.steps + index * 2 * (params.width + 2);
    // Two states that no path reaches come before the first.
    Real* previous = memory + 2;
    Real* current = previous + params.width + 2;
    // A step before the first, from which the recursion enters states 0 and 1 alone.
    for (int64_t s = thread - 2; s < states; s += threads) {
      previous[s] = s == 0 ? Real(0) : Never<Real>();
      if (s < 0) current[s] = Never<Real>();
    }

    const auto row_of = [&](int64_t t) { return params.log_probs + (t * items.items + index) * items.classes; };
    StateLabel held[kHeld];
    Real emitted[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t s = thread + k * threads;
      held[k] = s < states ? LabelOf(items, labels, s) : StateLabel{0, false};
      emitted[k] = s < states && item.input_length > 0 ? Widen(row_of(0)[held[k].label]) : Real(0);
    }
    Barrier();
    for (int64_t t = 0; t < item.input_length; ++t) {
      Real upcoming[kHeld] = {};
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (thread + k * threads >= states) break;
        if (t + 1 < item.input_length) upcoming[k] = Widen(row_of(t + 1)[held[k].label]);
        if (t + kStepsAhead < item.input_length) PrefetchToL2(row_of(t + kStepsAhead) + held[k].label);
      }
      T* out = item_alpha + t * params.width;
      const auto step = [&](int64_t s, bool jumps, Real log_prob) {
        const Real alpha = LogSumExp(previous[s], previous[s - 1], jumps ? previous[s - 2] : Never<Real>()) + log_prob;
        current[s] = alpha;
        out[s] = Narrow<T>(alpha);
      };
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const int64_t s = thread + k * threads;
        if (s >= states) break;
        step(s, held[k].jumps, emitted[k]);
        emitted[k] = upcoming[k];
      }
      for (int64_t s = thread + kHeld * threads; s < states; s += threads) {
        const StateLabel state = LabelOf(items, labels, s);
        step(s, state.jumps, Widen(row_of(t)[state.label]));
      }
      for (int64_t s = states + thread; s < params.width; s += threads) out[s] = Narrow<T>(Never<Real>());
      Barrier();
      Real* const swapped = previous;
      previous = current;
      current = swapped;
    }
    for (int64_t i = item.input_length * params.width + thread; i < items.steps * params.width; i += threads) {
      item_alpha[i] = Narrow<T>(Never<Real>());
    }
    if (thread == 0) {
      // Without a step, previous is the one before the first: certain for an empty target, impossible for others.
      const Real last = previous[states - 1];
      const Real likelihood = item.input_length == 0 ? last : LogSumExp(last, previous[states - 2], Never<Real>());
      params.neg_log_likelihood[index] = Narrow<T>(Real(0) - likelihood);
    }
    Barrier();
  }
}

template <class T>
Params<T> ParamsOf(const CtcLossArgs& args, Workspace& workspace) {
  using Real = ComputeType<T>;
  Params<T> params{};
  params.width = args.log_alpha.shape[2];
  params.items = CtcItemsOf(args, (params.width - 1) / 2, kLogProbsPlace, workspace);
  params.log_probs = args.log_probs.Data<T>();
  params.neg_log_likelihood = args.neg_log_likelihood.MutableData<T>();
  params.log_alpha = args.log_alpha.MutableData<T>();
  if (params.width > kSharedWidth<Real>)
    params.steps = workspace.Array<Real>(params.items.items * 2 * (params.width + 2));
  return params;
}

template <class T>
Status RunTyped(const CtcLossArgs& args, const Queue& queue) {
  Workspace workspace(queue.workspace);
  Params<T> params = ParamsOf<T>(args, workspace);
  params.items.fault = queue.fault;
  if (params.items.items == 0) return {};
  GRADFUSE_RETURN_IF_ERROR(FillCtcItems(args, params.items, queue));
  // As few states a thread as there may be threads: a step takes as long as its busiest thread.
  const auto threads = static_cast<int>(std::min<int64_t>(CeilDiv(params.width, kWarp) * kWarp, kMaxThreads));
  const bool shared = params.width <= kSharedWidth<ComputeType<T>>;
  return Launch(queue, shared ? Alpha<T, true> : Alpha<T, false>, params.items.items, threads, params);
}

}  // namespace

int64_t WorkspaceBytes(const CtcLossArgs& args) {
  Workspace workspace(nullptr);
  WithFloatType(args.log_probs.dtype, [&](auto type) { ParamsOf<decltype(type)>(args, workspace); });
  return workspace.bytes();
}

Status Run(const CtcLossArgs& args, const Queue& queue) {
  return WithFloatType(args.log_probs.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
