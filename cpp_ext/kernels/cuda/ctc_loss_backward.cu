#include "gradfuse/ops/ctc_loss_backward.h"
#include "kernels/cuda/ctc_items.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kThreads = 256;
constexpr int kStepsAhead = 8;
constexpr int kRows = 3;  // of states: what stays, goes on to the next one, and jumps
constexpr int32_t kLogProbsPlace = 2;

template <class T>
struct Params {
  using Real = ComputeType<T>;
  CtcItems items;
  const T* grad_out;
  const T* log_probs;
  const T* neg_log_likelihood;
  const T* log_alpha;
  T* out;
  int64_t width;  // of log_alpha
  bool zero_infinity;
  // Workspace.
  int64_t states;     // room for those of an item
  Real* gamma;        // (N, T, states): the posterior of each state at each step
  Real* rows;         // (N, kRows, states): where states do not fit into registers
  int64_t* same;      // (N, longest): of each label, the next place of the same one, or -1
  uint8_t* is_first;  // (N, longest): whether no earlier label is the same
};

// What becomes of an item.
enum class Outcome { kGradient, kZero, kNaN };

template <class T>
__device__ Outcome OutcomeOf(const Params<T>& params, int64_t index) {
  using Real = ComputeType<T>;
  if (params.items.item[index].is_bad != 0) return Outcome::kNaN;
  const Real loss = Widen(params.neg_log_likelihood[index]);
  if (loss == -Never<Real>() && params.zero_infinity) return Outcome::kZero;
  return loss - loss == 0 ? Outcome::kGradient : Outcome::kNaN;  // neither infinite nor NaN
}

// Chains the places of each label, so that the posteriors of a class add up in their order.
template <class T>
__global__ void __launch_bounds__(kThreads) ChainLabels(const __grid_constant__ Params<T> params) {
  const CtcItems& items = params.items;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t task = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; task < items.items * items.longest;
       task += stride) {
    const int64_t index = task / items.longest;
    const int64_t place = task - index * items.longest;
    const int64_t length = items.item[index].target_length;
    if (place >= length) continue;
    const int64_t* labels = items.labels + index * items.longest;
    bool is_first = true;
    for (int64_t other = 0; other < place && is_first; ++other) is_first = labels[other] != labels[place];
    int64_t next = place + 1;
    while (next < length && labels[next] != labels[place]) ++next;
    params.same[task] = next < length ? next : -1;
    params.is_first[task] = is_first;
  }
}

// How the probability of a state at step t + 1 divides among its predecessors at step t, by alpha of step t: the state
// itself, the one before it, and the one before that, if a path may jump from there.
template <class Real>
struct Division {
  Real stay;
  Real next;
  Real jump;
};

template <class Real>
__device__ Division<Real> Divide(Real a, Real b, Real c) {
  Real largest = a > b ? a : b;
  largest = c > largest ? c : largest;
  // Where nothing flows there is nothing to divide.
  if (largest == Never<Real>()) return {0, 0, 0};
  const Real exp_a = Exp(a - largest);
  const Real exp_b = Exp(b - largest);
  const Real exp_c = Exp(c - largest);
  const Real scale = Real(1) / (exp_a + exp_b + exp_c);
  return {exp_a * scale, exp_b * scale, exp_c * scale};
}

// The product of a posterior and its share; where nothing flows the share is of no matter, and may be NaN.
template <class Real>
__device__ Real Flow(Real gamma, Real share) {
  return gamma != 0 ? gamma * share : Real(0);
}

// The posterior of the last step: the paths that end in the last blank and those that end in the last label.
template <class T, class Real = ComputeType<T>>
__device__ Real EndPosterior(const T* alpha, int64_t states, int64_t state) {
  const Real blank = Widen(alpha[states - 1]);
  const Real label = states > 1 ? Widen(alpha[states - 2]) : Never<Real>();
  const Division<Real> parts = Divide(blank, label, Never<Real>());
  return state == states - 1 ? parts.stay : state == states - 2 ? parts.next : Real(0);
}

// Whether a path may reach a state from two before: only an odd state's label may follow the label before it without a
// blank, and only if the two differ.
__device__ inline bool Jumps(const int64_t* labels, int64_t state) {
  return state % 2 == 1 && state > 1 && labels[state / 2] != labels[state / 2 - 1];
}

// As in the CPU's kernel: alpha says how the posterior of a state at step t + 1 divides among its predecessors, so that
// no backward recursion over beta is needed.
//   gamma_t(p) = sum over successors s of p of gamma_{t+1}(s) exp(alpha_t(p)) / sum over predecessors q of s of
//                exp(alpha_t(q))
//
// An item to a block; a thread holds states thread, thread + threads, ... in registers. The division of a step does not
// depend on the posteriors, so it is ready before they are. Rows that threads exchange come in pairs, one for even and
// one for odd steps: then one barrier a step is enough.
template <class T, int kHeld>
__global__ void __launch_bounds__(kMaxThreads) HeldPosteriors(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  constexpr int kRow = kHeld * kMaxThreads + 2;
  GRADFUSE_SHARED(Real, alpha_rows, 2 * kRow);  // two states that no path reaches come first
  GRADFUSE_SHARED(Real, next_rows, 2 * kRow);   // two states that nothing flows from come last
  GRADFUSE_SHARED(Real, jump_rows, 2 * kRow);
  const CtcItems& items = params.items;
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t index = blockIdx.x; index < items.items; index += gridDim.x) {
    const CtcItem item = items.item[index];
    if (item.input_length == 0 || OutcomeOf(params, index) != Outcome::kGradient) continue;
    const int states = static_cast<int>(2 * item.target_length + 1);
    const int64_t* labels = items.labels + index * items.longest;
    const auto alpha_at = [&](int64_t t) { return params.log_alpha + (index * items.steps + t) * params.width; };
    const int64_t last = item.input_length - 1;

    bool jumps[kHeld] = {};
    Real gamma[kHeld] = {};
    Real alpha_before[kHeld] = {};  // of the step before the one at hand
    Division<Real> division[kHeld] = {};
    if (thread < 4) {
      const int parity = thread / 2;
      alpha_rows[parity * kRow + thread % 2] = Never<Real>();
      next_rows[parity * kRow + states + thread % 2] = 0;
      jump_rows[parity * kRow + states + thread % 2] = 0;
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int s = thread + k * threads;
      if (s >= states) break;
      jumps[k] = Jumps(labels, s);
      if (last > 0) alpha_before[k] = Widen(alpha_at(last - 1)[s]);
    }

    for (int64_t t = last; t >= 0; --t) {
      Real* const alpha = alpha_rows + t % 2 * kRow + 2;
      Real* const next = next_rows + t % 2 * kRow;
      Real* const jump = jump_rows + t % 2 * kRow;
      // What flows to step t, which the division by its alpha says; and alpha of the step before, for the next
      // division.
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const int s = thread + k * threads;
        if (s >= states) break;
        next[s] = Flow(gamma[k], division[k].next);
        jump[s] = Flow(gamma[k], division[k].jump);
        gamma[k] = Flow(gamma[k], division[k].stay);
        alpha[s] = alpha_before[k];
        if (t > 1) alpha_before[k] = Widen(alpha_at(t - 2)[s]);
        if (t >= kStepsAhead) PrefetchToL2(alpha_at(t - kStepsAhead) + s);
      }
      Barrier();
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const int s = thread + k * threads;
        if (s >= states) break;
        gamma[k] = t == last ? EndPosterior<T>(alpha_at(t), states, s) : gamma[k] + next[s + 1] + jump[s + 2];
        params.gamma[(index * items.steps + t) * params.states + s] = gamma[k];
        division[k] = Divide(alpha[s], alpha[s - 1], jumps[k] ? alpha[s - 2] : Never<Real>());
      }
    }
    Barrier();
  }
}

// The same for items of any number of states, which stay in memory.
template <class T>
__global__ void __launch_bounds__(kMaxThreads) LongPosteriors(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  const CtcItems& items = params.items;
  for (int64_t index = blockIdx.x; index < items.items; index += gridDim.x) {
    const CtcItem item = items.item[index];
    if (item.input_length == 0 || OutcomeOf(params, index) != Outcome::kGradient) continue;
    const int64_t states = 2 * item.target_length + 1;
    const int64_t* labels = items.labels + index * items.longest;
    Real* const stay = params.rows + index * kRows * params.states;
    Real* const next = stay + params.states;
    Real* const jump = next + params.states;
    const int64_t last = item.input_length - 1;
    for (int64_t t = last; t >= 0; --t) {
      const T* alpha = params.log_alpha + (index * items.steps + t) * params.width;
      Real* gamma = params.gamma + (index * items.steps + t) * params.states;
      for (int64_t s = threadIdx.x; s < states && t < last; s += blockDim.x) {
        const Division<Real> division = Divide<Real>(Widen(alpha[s]), s > 0 ? Widen(alpha[s - 1]) : Never<Real>(),
                                                     Jumps(labels, s) ? Widen(alpha[s - 2]) : Never<Real>());
        const Real after = gamma[params.states + s];
        stay[s] = Flow(after, division.stay);
        next[s] = Flow(after, division.next);
        jump[s] = Flow(after, division.jump);
      }
      Barrier();
      for (int64_t s = threadIdx.x; s < states; s += blockDim.x) {
        gamma[s] = t == last
                       ? EndPosterior<T>(alpha, states, s)
                       : stay[s] + (s + 1 < states ? next[s + 1] : Real(0)) + (s + 2 < states ? jump[s + 2] : Real(0));
      }
      Barrier();
    }
  }
}

// A row of classes to kLanes threads: the gradient where no path goes, of all classes; then those that the item uses
// are mended.
template <class T, int kLanes, int kVec>
__global__ void __launch_bounds__(kThreads) Gradient(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  constexpr int kRowsPerBlock = kThreads / kLanes;
  const CtcItems& items = params.items;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t rows = items.steps * items.items;
  for (int64_t tile = blockIdx.x; tile * kRowsPerBlock < rows; tile += gridDim.x) {
    const int64_t row = tile * kRowsPerBlock + static_cast<int>(threadIdx.x) / kLanes;
    if (row >= rows) continue;  // as one: a row's threads are a warp or the block
    const int64_t t = row / items.items;
    const int64_t index = row - t * items.items;
    const CtcItem item = items.item[index];
    const T* log_probs = params.log_probs + row * items.classes;
    T* out = params.out + row * items.classes;

    const Outcome outcome = OutcomeOf(params, index);
    const bool past_end = t >= item.input_length && item.is_bad == 0;
    if (past_end || outcome != Outcome::kGradient) {
      Pack<T, kVec> pack;
      const T value = Narrow<T>(past_end || outcome == Outcome::kZero ? Real(0) : NotANumber<Real>());
#pragma unroll
      for (int i = 0; i < kVec; ++i) pack.values[i] = value;
      for (int64_t c = lane * kVec; c < items.classes; c += kLanes * kVec) StoreOnce(out + c, pack);
      continue;
    }

    const Real grad_out = Widen(params.grad_out[index]);
#pragma unroll 4
    for (int64_t c = lane * kVec; c < items.classes; c += kLanes * kVec) {
      Pack<T, kVec> pack = LoadOnce<Pack<T, kVec>>(log_probs + c);
#pragma unroll
      for (int i = 0; i < kVec; ++i) pack.values[i] = Narrow<T>(Exp(Widen(pack.values[i])) * grad_out);
      StoreOnce(out + c, pack);
    }

    const int64_t length = item.target_length;
    const int64_t* labels = items.labels + index * items.longest;
    const int64_t* same = params.same + index * items.longest;
    const Real* gamma = params.gamma + (index * items.steps + t) * params.states;
    Real blank = 0;
    for (int64_t place = lane; place <= length; place += kLanes) {
      blank += gamma[2 * place];
      if (place < length && labels[place] == items.blank) blank += gamma[2 * place + 1];
    }
    if constexpr (kLanes == kWarp) {
      WarpBarrier();
      blank = SumOverLanes<kWarp>(blank);
    } else {
      blank = SumOverBlock<kLanes>(blank);  // with its barriers
    }
    const auto mend = [&](int64_t label, Real occupied) {
      out[label] = Narrow<T>((Exp(Widen(log_probs[label])) - occupied) * grad_out);
    };
    if (lane == 0) mend(items.blank, blank);
    for (int64_t place = lane; place < length; place += kLanes) {
      if (params.is_first[index * items.longest + place] == 0 || labels[place] == items.blank) continue;
      Real occupied = 0;
      for (int64_t other = place; other >= 0; other = same[other]) occupied += gamma[2 * other + 1];
      mend(labels[place], occupied);
    }
  }
}

template <class T>
constexpr int kMostHeld = sizeof(ComputeType<T>) == 4 ? 3 : 1;  // as many as shared memory has rows for

template <class T>
Params<T> ParamsOf(const CtcLossBackwardArgs& args, Workspace& workspace) {
  using Real = ComputeType<T>;
  Params<T> params{};
  params.width = args.log_alpha.shape[2];
  params.items = CtcItemsOf(args, (params.width - 1) / 2, kLogProbsPlace, workspace);
  params.grad_out = args.grad_out.Data<T>();
  params.log_probs = args.log_probs.Data<T>();
  params.neg_log_likelihood = args.neg_log_likelihood.Data<T>();
  params.log_alpha = args.log_alpha.Data<T>();
  params.out = args.grad_input.MutableData<T>();
  params.zero_infinity = args.zero_infinity != 0;
  const int64_t items = params.items.items;
  params.states = 2 * params.items.longest + 1;
  params.gamma = workspace.Array<Real>(items * params.items.steps * params.states);
  params.same = workspace.Array<int64_t>(items * params.items.longest);
  params.is_first = workspace.Array<uint8_t>(items * params.items.longest);
  if (params.states > kMostHeld<T> * kMaxThreads) params.rows = workspace.Array<Real>(items * kRows * params.states);
  return params;
}

template <class T>
Status StartPosteriors(const Params<T>& params, const Queue& queue) {
  const int64_t items = params.items.items;
  if (params.states > kMostHeld<T> * kMaxThreads) return Launch(queue, LongPosteriors<T>, items, kMaxThreads, params);
  const auto threads = static_cast<int>(std::min<int64_t>(CeilDiv(params.states, kWarp) * kWarp, kMaxThreads));
  if (params.states <= kMaxThreads) return Launch(queue, HeldPosteriors<T, 1>, items, threads, params);
  return Launch(queue, HeldPosteriors<T, kMostHeld<T>>, items, threads, params);
}

template <class T, int kVec>
Status StartGradient(const Params<T>& params, const Queue& queue) {
  constexpr int64_t kShortRow = 32 * kWarp;
  const int64_t rows = params.items.steps * params.items.items;
  if (params.items.classes > kShortRow) return Launch(queue, Gradient<T, kThreads, kVec>, rows, kThreads, params);
  return Launch(queue, Gradient<T, kWarp, kVec>, CeilDiv(rows, kThreads / kWarp), kThreads, params);
}

template <class T>
Status RunTyped(const CtcLossBackwardArgs& args, const Queue& queue) {
  Workspace workspace(queue.workspace);
  Params<T> params = ParamsOf<T>(args, workspace);
  params.items.fault = queue.fault;
  if (args.grad_input.NumElements() == 0) return {};
  GRADFUSE_RETURN_IF_ERROR(FillCtcItems(args, params.items, queue));
  const int64_t labels = params.items.items * params.items.longest;
  GRADFUSE_RETURN_IF_ERROR(Launch(queue, ChainLabels<T>, CeilDiv(labels, kThreads), kThreads, params));
  GRADFUSE_RETURN_IF_ERROR(StartPosteriors(params, queue));
  constexpr int kVec = kWidest<T>;
  const bool aligned = IsAligned(params.log_probs) && IsAligned(params.out) && params.items.classes % kVec == 0;
  return aligned ? StartGradient<T, kVec>(params, queue) : StartGradient<T, 1>(params, queue);
}

}  // namespace

int64_t WorkspaceBytes(const CtcLossBackwardArgs& args) {
  Workspace workspace(nullptr);
  WithFloatType(args.log_probs.dtype, [&](auto type) { ParamsOf<decltype(type)>(args, workspace); });
  return workspace.bytes();
}

Status Run(const CtcLossBackwardArgs& args, const Queue& queue) {
  return WithFloatType(args.log_probs.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
