#include "gradfuse/ops/batch_norm_backward.h"

#include <algorithm>
#include <vector>

#include "kernels/batch_norm.h"
#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/batch_norm_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_BATCH_NORM_BACKWARD_SHARED
#define GRADFUSE_BATCH_NORM_BACKWARD_SHARED
namespace gradfuse::cpu {
namespace {

// Planes of a channel, or with one element a plane rows of neighbouring channels, `pitch` elements apart.
template <class T>
struct GradPlanes {
  const T* grad_output;
  const T* input;
  const T* relu_output;  // or null
  T* grad_input;         // or null
  int64_t pitch;
  int64_t count;
  int64_t size;

  void Advance(int64_t elements) {
    grad_output += elements;
    input += elements;
    if (relu_output != nullptr) relu_output += elements;
    if (grad_input != nullptr) grad_input += elements;
  }
};

struct GradSums {
  double grad = 0;
  double product = 0;  // with the input's distance from its mean
};

// grad_input = scale grad + (slope (input - mean) + offset).
template <class Real>
struct GradFactors {
  Real mean;
  Real scale;
  Real slope;
  Real offset;
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <bool kGates, class At, class T>
GRADFUSE_INLINE hn::Vec<TagOf<T>> Gradient(At at, const GradPlanes<T>& planes, int64_t i) {
  const TagOf<T> d;
  const auto grad = Load(at, d, planes.grad_output + i);
  if constexpr (!kGates) return grad;
  // Where the ReLU's output is NaN the gradient passes, as PyTorch's.
  return hn::IfThenZeroElse(Load(at, d, planes.relu_output + i) <= hn::Zero(d), grad);
}

template <class T, bool kGates>
void AddPlanes(const GradPlanes<T>& channel, ComputeType<T> mean, GradSums* sums) {
  const TagOf<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto middle = hn::Set(d, mean);
  GradPlanes<T> plane = channel;
  auto grad_even = hn::Zero(d);
  auto grad_odd = hn::Zero(d);
  auto product_even = hn::Zero(d);
  auto product_odd = hn::Zero(d);
  int64_t added = 0;
  for (int64_t left = channel.count; left > 0; --left, plane.Advance(channel.pitch)) {
    const int64_t ahead = AskedAhead<T>(plane.size, plane.pitch, left == 1);
    const auto ask = [&](int64_t i) HWY_ATTR {
      Prefetch(d, plane.grad_output + ahead + i);
      Prefetch(d, plane.input + ahead + i);
      if constexpr (kGates) Prefetch(d, plane.relu_output + ahead + i);
    };
    for (int64_t begin = 0; begin < plane.size; begin += kAddedTogether) {
      const int64_t end = std::min(plane.size, begin + kAddedTogether);
      int64_t i = begin;
      for (; i + 2 * lanes <= end; i += 2 * lanes) {
        ask(i);
        ask(i + lanes);
        const auto even = Gradient<kGates>(Whole(), plane, i);
        grad_even = grad_even + even;
        product_even = hn::MulAdd(even, Load(Whole(), d, plane.input + i) - middle, product_even);
        const auto odd = Gradient<kGates>(Whole(), plane, i + lanes);
        grad_odd = grad_odd + odd;
        product_odd = hn::MulAdd(odd, Load(Whole(), d, plane.input + i + lanes) - middle, product_odd);
      }
      ForEachVector(d, end - i, [&](int64_t rest, auto at) HWY_ATTR {
        const auto grad = Gradient<kGates>(at, plane, i + rest);
        grad_even = grad_even + grad;
        product_even = hn::MulAdd(grad, Load(at, d, plane.input + i + rest) - middle, product_even);
      });
      added += end - begin;
      if (added >= kAddedTogether || left == 1) {
        sums->grad += static_cast<double>(hn::ReduceSum(d, grad_even + grad_odd));
        sums->product += static_cast<double>(hn::ReduceSum(d, product_even + product_odd));
        grad_even = grad_odd = product_even = product_odd = hn::Zero(d);
        added = 0;
      }
    }
  }
}

template <class T, bool kGates, bool kStreams>
void WritePlanes(const GradPlanes<T>& channel, const GradFactors<ComputeType<T>>& factors) {
  const TagOf<T> d;
  const auto mean = hn::Set(d, factors.mean);
  const auto scale = hn::Set(d, factors.scale);
  const auto slope = hn::Set(d, factors.slope);
  const auto offset = hn::Set(d, factors.offset);
  GradPlanes<T> plane = channel;
  for (int64_t left = channel.count; left > 0; --left, plane.Advance(channel.pitch)) {
    const int64_t ahead = AskedAhead<T>(plane.size, plane.pitch, left == 1);
    ForEachVectorInto<Sink<kStreams, Whole>>(plane.grad_input, d, plane.size, [&](int64_t i, auto at) HWY_ATTR {
      if constexpr (!kStreams && hn::MaxLanes(d) > 1) __builtin_prefetch(plane.grad_input + ahead + i, /*rw=*/1);
      const auto distance = Load(at, d, plane.input + i) - mean;
      const auto grad = Gradient<kGates>(at, plane, i);
      Store(at, hn::MulAdd(scale, grad, hn::MulAdd(slope, distance, offset)), d, plane.grad_input + i);
    });
  }
}

// The same for rows of neighbouring channels, with numbers for each.
template <class T, bool kGates>
void AddRows(const GradPlanes<T>& channels, const ComputeType<T>* means, GradSums* sums) {
  using Real = ComputeType<T>;
  const TagOf<T> d;
  GradPlanes<T> row = channels;
  for (int64_t begin = 0; begin < channels.count; begin += kRowsTogether) {
    Real grads[kChannelsPerPanel] = {};
    Real products[kChannelsPerPanel] = {};
    for (int64_t left = std::min(kRowsTogether, channels.count - begin); left > 0; --left, row.Advance(row.pitch)) {
      ForEachVector(d, row.size, [&](int64_t c, auto at) HWY_ATTR {
        const auto grad = Gradient<kGates>(at, row, c);
        const auto distance = Load(at, d, row.input + c) - Load(at, d, means + c);
        Store(at, Load(at, d, grads + c) + grad, d, grads + c);
        Store(at, hn::MulAdd(grad, distance, Load(at, d, products + c)), d, products + c);
      });
    }
    for (int64_t c = 0; c < row.size; ++c) {
      sums[c].grad += static_cast<double>(grads[c]);
      sums[c].product += static_cast<double>(products[c]);
    }
  }
}

template <class T, bool kGates>
void WriteRows(const GradPlanes<T>& channels, const ComputeType<T>* means, const ComputeType<T>* scales,
               const ComputeType<T>* slopes, const ComputeType<T>* offsets) {
  const TagOf<T> d;
  GradPlanes<T> row = channels;
  for (int64_t left = channels.count; left > 0; --left, row.Advance(row.pitch)) {
    ForEachVector(d, row.size, [&](int64_t c, auto at) HWY_ATTR {
      const auto distance = Load(at, d, row.input + c) - Load(at, d, means + c);
      const auto rest = hn::MulAdd(Load(at, d, slopes + c), distance, Load(at, d, offsets + c));
      Store(at, hn::MulAdd(Load(at, d, scales + c), Gradient<kGates>(at, row, c), rest), d, row.grad_input + c);
    });
  }
}

template <class T>
using WriteFunction = void (*)(const GradPlanes<T>&, const GradFactors<ComputeType<T>>&);

template <class T>
WriteFunction<T> WriteFunctionFor(bool gates, bool streams) {
  static constexpr WriteFunction<T> kFunctions[2][2] = {{WritePlanes<T, false, false>, WritePlanes<T, false, true>},
                                                        {WritePlanes<T, true, false>, WritePlanes<T, true, true>}};
  return kFunctions[gates][streams];
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class A, class T>
class Kernel {
 public:
  Kernel(const BatchNormBackwardArgs& args, const ParallelFor& parallel)
      : args_(args), parallel_(parallel), planes_(args.input.shape) {}

  void Run() const {
    if (planes_.channels == 0) return;
    if (planes_.size == 1) {
      RunRows();
    } else {
      RunPlanes();
    }
  }

 private:
  using Real = ComputeType<T>;

  bool WantsInput() const { return args_.output_mask[0] != 0 && planes_.count() > 0; }
  int64_t Cost() const {
    const int tensors = (args_.relu_output ? 3 : 2) + (WantsInput() ? 1 : 0);
    return tensors * args_.input.NumBytes();
  }

  GradPlanes<A> Planes(int64_t first, int64_t count, int64_t size) const {
    GradPlanes<A> planes{args_.grad_output.Data<A>(),
                         args_.input.Data<A>(),
                         args_.relu_output ? args_.relu_output->Data<A>() : nullptr,
                         WantsInput() ? args_.grad_input.MutableData<A>() : nullptr,
                         planes_.channels * planes_.size,
                         count,
                         size};
    planes.Advance(first);
    return planes;
  }

  // Writes the gradients of weight and bias, and returns what the input's is made of.
  GradFactors<Real> Finish(int64_t channel, const GradSums& sums) const {
    const auto invstd = static_cast<double>(ToCompute(args_.save_invstd.Data<T>()[channel]));
    const double weight = args_.weight ? static_cast<double>(ToCompute(args_.weight->Data<T>()[channel])) : 1.0;
    const auto write = [&](const MutableTensor& out, double value) {
      out.MutableData<T>()[channel] = FromCompute<T>(static_cast<Real>(value));
    };
    if (args_.output_mask[1] != 0) write(args_.grad_weight, sums.product * invstd);
    if (args_.output_mask[2] != 0) write(args_.grad_bias, sums.grad);
    const auto count = static_cast<double>(planes_.count());
    const double scale = weight * invstd;
    const double slope = -scale * invstd * invstd * (sums.product / count);
    return {ToCompute(args_.save_mean.Data<T>()[channel]), static_cast<Real>(scale), static_cast<Real>(slope),
            static_cast<Real>(-scale * (sums.grad / count))};
  }

  // A task has a channel: its sums, and then its gradient while it is in the cache. Few channels are cut into parts of
  // the batch.
  void RunPlanes() const {
    const bool gates = args_.relu_output.has_value();
    const bool streams = Cost() >= StreamBytes() && args_.grad_input.data != args_.grad_output.data;
    const auto add = gates ? GRADFUSE_DISPATCH(AddPlanes<A, true>) : GRADFUSE_DISPATCH(AddPlanes<A, false>);
    const auto write = GRADFUSE_DISPATCH(WriteFunctionFor<A>)(gates, streams);
    const int64_t channels = planes_.channels;
    const BatchParts parts(planes_);
    const auto part_of = [&](int64_t task) { return Planes(parts.Begin(task), parts.Items(task), planes_.size); };
    const auto sums_of = [&](const GradPlanes<A>& planes, int64_t channel) {
      GradSums sums;
      add(planes, ToCompute(args_.save_mean.Data<T>()[channel]), &sums);
      return sums;
    };
    if (parts.count() == 1) {
      parallel_(channels, Cost(), [&](int64_t channel) {
        const StreamFence fence(streams);
        const GradPlanes<A> planes = part_of(channel);
        const GradFactors<Real> factors = Finish(channel, sums_of(planes, channel));
        if (WantsInput()) write(planes, factors);
      });
      return;
    }
    std::vector<GradSums> sums(static_cast<size_t>(channels * parts.count()));
    parallel_(channels * parts.count(), Cost(),
              [&](int64_t task) { sums[static_cast<size_t>(task)] = sums_of(part_of(task), parts.Channel(task)); });
    std::vector<GradFactors<Real>> factors(static_cast<size_t>(channels));
    for (int64_t channel = 0; channel < channels; ++channel) {
      GradSums total;
      for (int64_t part = 0; part < parts.count(); ++part) {
        const GradSums& sum = sums[static_cast<size_t>(channel * parts.count() + part)];
        total.grad += sum.grad;
        total.product += sum.product;
      }
      factors[static_cast<size_t>(channel)] = Finish(channel, total);
    }
    if (!WantsInput()) return;
    parallel_(channels * parts.count(), Cost(), [&](int64_t task) {
      const StreamFence fence(streams);
      write(part_of(task), factors[static_cast<size_t>(parts.Channel(task))]);
    });
  }

  // (N, C): the elements of a channel are no neighbours, but channels are.
  void RunRows() const {
    const bool gates = args_.relu_output.has_value();
    const auto add = gates ? GRADFUSE_DISPATCH(AddRows<A, true>) : GRADFUSE_DISPATCH(AddRows<A, false>);
    const auto write = gates ? GRADFUSE_DISPATCH(WriteRows<A, true>) : GRADFUSE_DISPATCH(WriteRows<A, false>);
    parallel_(CeilDiv(planes_.channels, kChannelsPerPanel), Cost(), [&](int64_t panel) {
      const int64_t first = panel * kChannelsPerPanel;
      const int64_t width = std::min(kChannelsPerPanel, planes_.channels - first);
      const GradPlanes<A> rows = Planes(first, planes_.batch, width);
      Real means[kChannelsPerPanel];
      for (int64_t c = 0; c < width; ++c) means[c] = ToCompute(args_.save_mean.Data<T>()[first + c]);
      GradSums sums[kChannelsPerPanel];
      add(rows, means, sums);
      Real scales[kChannelsPerPanel];
      Real slopes[kChannelsPerPanel];
      Real offsets[kChannelsPerPanel];
      for (int64_t c = 0; c < width; ++c) {
        const GradFactors<Real> factors = Finish(first + c, sums[c]);
        scales[c] = factors.scale;
        slopes[c] = factors.slope;
        offsets[c] = factors.offset;
      }
      if (WantsInput()) write(rows, means, scales, slopes, offsets);
    });
  }

  const BatchNormBackwardArgs& args_;
  const ParallelFor& parallel_;
  const ChannelPlanes planes_;
};

}  // namespace

void Run(const BatchNormBackwardArgs& args, const ParallelFor& parallel) {
  WithActivationTypes<false>(args.input.dtype, args.save_mean.dtype,
                             [&](auto a, auto t) { Kernel<decltype(a), decltype(t)>(args, parallel).Run(); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
