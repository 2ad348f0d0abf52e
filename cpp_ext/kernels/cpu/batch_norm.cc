#include "gradfuse/ops/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/batch_norm.h"
#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/batch_norm.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_BATCH_NORM_SHARED
#define GRADFUSE_BATCH_NORM_SHARED
namespace gradfuse::cpu {
namespace {

// Planes of a channel, or with one element a plane rows of neighbouring channels, `pitch` elements apart.
template <class T>
struct NormPlanes {
  const T* input;
  T* output;
  int64_t pitch;
  int64_t count;
  int64_t size;

  void Advance(int64_t elements) {
    input += elements;
    output += elements;
  }
};

// output = scale (input - mean) + offset.
struct NormFactors {
  float mean;
  float scale;
  float offset;
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class D>
GRADFUSE_INLINE hn::Vec<D> OnlyThere(D, Whole, hn::Vec<D> value) {
  return value;
}
template <class D>
GRADFUSE_INLINE hn::Vec<D> OnlyThere(D d, Part part, hn::Vec<D> value) {
  return hn::IfThenElseZero(hn::FirstN(d, part.lanes), value);
}

// The sum of distances from a centre, or of their squares.
template <class T, bool kSquares>
double SumOfPlanes(const NormPlanes<T>& channel, float centre) {
  const TagOf<T> d;
  using V = hn::Vec<TagOf<T>>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto middle = hn::Set(d, centre);
  const auto add = [&](V sum, V distance) HWY_ATTR {
    if constexpr (kSquares) return hn::MulAdd(distance, distance, sum);
    return sum + distance;
  };
  NormPlanes<T> plane = channel;
  auto even = hn::Zero(d);
  auto odd = hn::Zero(d);
  double total = 0;
  int64_t added = 0;
  for (int64_t left = channel.count; left > 0; --left, plane.Advance(channel.pitch)) {
    const int64_t ahead = AskedAhead<T>(plane.size, plane.pitch, left == 1);
    for (int64_t begin = 0; begin < plane.size; begin += kAddedTogether) {
      const int64_t end = std::min(plane.size, begin + kAddedTogether);
      int64_t i = begin;
      for (; i + 2 * lanes <= end; i += 2 * lanes) {
        Prefetch(d, plane.input + ahead + i);
        Prefetch(d, plane.input + ahead + i + lanes);
        even = add(even, Load(Whole(), d, plane.input + i) - middle);
        odd = add(odd, Load(Whole(), d, plane.input + i + lanes) - middle);
      }
      ForEachVector(d, end - i, [&](int64_t rest, auto at) HWY_ATTR {
        even = add(even, OnlyThere(d, at, Load(at, d, plane.input + i + rest) - middle));
      });
      added += end - begin;
      if (added >= kAddedTogether || left == 1) {
        total += static_cast<double>(hn::ReduceSum(d, even + odd));
        even = odd = hn::Zero(d);
        added = 0;
      }
    }
  }
  return total;
}

template <bool kRelu, class D>
GRADFUSE_INLINE hn::Vec<D> Activated(D d, hn::Vec<D> value) {
  // NaN stays NaN.
  if constexpr (kRelu) return hn::IfThenZeroElse(value <= hn::Zero(d), value);
  return value;
}

template <class T, bool kRelu, bool kStreams>
void WritePlanes(const NormPlanes<T>& channel, const NormFactors& factors) {
  const TagOf<T> d;
  const auto mean = hn::Set(d, factors.mean);
  const auto scale = hn::Set(d, factors.scale);
  const auto offset = hn::Set(d, factors.offset);
  NormPlanes<T> plane = channel;
  for (int64_t left = channel.count; left > 0; --left, plane.Advance(channel.pitch)) {
    const int64_t ahead = AskedAhead<T>(plane.size, plane.pitch, left == 1);
    ForEachVectorInto<Sink<kStreams, Whole>>(plane.output, d, plane.size, [&](int64_t i, auto at) HWY_ATTR {
      if constexpr (!kStreams && hn::MaxLanes(d) > 1) __builtin_prefetch(plane.output + ahead + i, /*rw=*/1);
      const auto value = hn::MulAdd(scale, Load(at, d, plane.input + i) - mean, offset);
      Store(at, Activated<kRelu>(d, value), d, plane.output + i);
    });
  }
}

// The same for rows of neighbouring channels, with numbers for each.
template <class T, bool kSquares>
void AddRows(const NormPlanes<T>& channels, const float* centres, double* sums) {
  const TagOf<T> d;
  NormPlanes<T> row = channels;
  for (int64_t begin = 0; begin < channels.count; begin += kRowsTogether) {
    float parts[kChannelsPerPanel] = {};
    for (int64_t left = std::min(kRowsTogether, channels.count - begin); left > 0; --left, row.Advance(row.pitch)) {
      ForEachVector(d, row.size, [&](int64_t c, auto at) HWY_ATTR {
        const auto distance = Load(at, d, row.input + c) - Load(at, d, centres + c);
        const auto part = Load(at, d, parts + c);
        Store(at, kSquares ? hn::MulAdd(distance, distance, part) : part + distance, d, parts + c);
      });
    }
    for (int64_t c = 0; c < row.size; ++c) sums[c] += static_cast<double>(parts[c]);
  }
}

template <class T, bool kRelu>
void WriteRows(const NormPlanes<T>& channels, const float* means, const float* scales, const float* offsets) {
  const TagOf<T> d;
  NormPlanes<T> row = channels;
  for (int64_t left = channels.count; left > 0; --left, row.Advance(row.pitch)) {
    ForEachVector(d, row.size, [&](int64_t c, auto at) HWY_ATTR {
      const auto distance = Load(at, d, row.input + c) - Load(at, d, means + c);
      const auto value = hn::MulAdd(Load(at, d, scales + c), distance, Load(at, d, offsets + c));
      Store(at, Activated<kRelu>(d, value), d, row.output + c);
    });
  }
}

template <class T>
using WriteFunction = void (*)(const NormPlanes<T>&, const NormFactors&);

template <class T>
WriteFunction<T> WriteFunctionFor(bool relu, bool streams) {
  static constexpr WriteFunction<T> kFunctions[2][2] = {{WritePlanes<T, false, false>, WritePlanes<T, false, true>},
                                                        {WritePlanes<T, true, false>, WritePlanes<T, true, true>}};
  return kFunctions[relu][streams];
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
  Kernel(const BatchNormArgs& args, const ParallelFor& parallel)
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
  int64_t Cost() const { return 3 * args_.input.NumBytes(); }

  NormPlanes<A> Planes(int64_t first, int64_t count, int64_t size) const {
    NormPlanes<A> planes{args_.input.Data<A>(), args_.output.MutableData<A>(), planes_.channels * planes_.size, count,
                         size};
    planes.Advance(first);
    return planes;
  }

  // A number that the channel lies around, as far as its first element tells.
  float CentreOf(int64_t channel) const {
    return planes_.count() > 0 ? ToCompute(args_.input.Data<A>()[channel * planes_.size]) : 0.0F;
  }

  double MeanOf(int64_t channel, double sum) const {
    return static_cast<double>(CentreOf(channel)) + sum / static_cast<double>(planes_.count());
  }

  // Writes the statistics of a channel, and returns what its output is made of.
  NormFactors Finish(int64_t channel, double mean, double squares) const {
    const auto count = static_cast<double>(planes_.count());
    const double invstd = 1.0 / std::sqrt(squares / count + static_cast<double>(args_.eps));
    const auto value_of = [&](const std::optional<Tensor>& tensor, double otherwise) {
      return tensor ? static_cast<double>(ToCompute(tensor->template Data<T>()[channel])) : otherwise;
    };
    const auto write = [&](const MutableTensor& out, double value) {
      out.MutableData<T>()[channel] = FromCompute<T>(static_cast<float>(value));
    };
    write(args_.save_mean, mean);
    write(args_.save_invstd, invstd);
    const auto momentum = static_cast<double>(args_.momentum);
    const auto update = [&](const MutableTensor& out, const std::optional<Tensor>& old, double found) {
      if (old) write(out, (1.0 - momentum) * value_of(old, 0.0) + momentum * found);
    };
    update(args_.new_running_mean, args_.running_mean, mean);
    update(args_.new_running_var, args_.running_var, squares / (count - 1.0));
    return {static_cast<float>(mean), static_cast<float>(value_of(args_.weight, 1.0) * invstd),
            static_cast<float>(value_of(args_.bias, 0.0))};
  }

  // A task has a channel, which stays in the cache: its sum, that of squares, and its output. Few channels are cut into
  // parts of the batch.
  void RunPlanes() const {
    const bool streams = Cost() >= StreamBytes();
    const auto sum = GRADFUSE_DISPATCH(SumOfPlanes<A, false>);
    const auto squares = GRADFUSE_DISPATCH(SumOfPlanes<A, true>);
    const auto write = GRADFUSE_DISPATCH(WriteFunctionFor<A>)(args_.relu != 0, streams);
    const BatchParts parts(planes_);
    const auto part_of = [&](int64_t task) { return Planes(parts.Begin(task), parts.Items(task), planes_.size); };
    if (parts.count() == 1) {
      parallel_(planes_.channels, Cost(), [&](int64_t channel) {
        const StreamFence fence(streams);
        const NormPlanes<A> planes = part_of(channel);
        const double mean = MeanOf(channel, sum(planes, CentreOf(channel)));
        write(planes, Finish(channel, mean, squares(planes, static_cast<float>(mean))));
      });
      return;
    }
    const int64_t tasks = planes_.channels * parts.count();
    std::vector<double> found(static_cast<size_t>(tasks));
    const auto total = [&](int64_t channel) {
      double all = 0;
      for (int64_t part = 0; part < parts.count(); ++part) {
        all += found[static_cast<size_t>(channel * parts.count() + part)];
      }
      return all;
    };
    parallel_(tasks, Cost(), [&](int64_t task) {
      found[static_cast<size_t>(task)] = sum(part_of(task), CentreOf(parts.Channel(task)));
    });
    std::vector<double> means(static_cast<size_t>(planes_.channels));
    for (int64_t channel = 0; channel < planes_.channels; ++channel) {
      means[static_cast<size_t>(channel)] = MeanOf(channel, total(channel));
    }
    parallel_(tasks, Cost(), [&](int64_t task) {
      const double mean = means[static_cast<size_t>(parts.Channel(task))];
      found[static_cast<size_t>(task)] = squares(part_of(task), static_cast<float>(mean));
    });
    std::vector<NormFactors> factors(static_cast<size_t>(planes_.channels));
    for (int64_t channel = 0; channel < planes_.channels; ++channel) {
      factors[static_cast<size_t>(channel)] = Finish(channel, means[static_cast<size_t>(channel)], total(channel));
    }
    parallel_(tasks, Cost(), [&](int64_t task) {
      const StreamFence fence(streams);
      write(part_of(task), factors[static_cast<size_t>(parts.Channel(task))]);
    });
  }

  // (N, C): the elements of a channel are no neighbours, but channels are.
  void RunRows() const {
    const auto add = GRADFUSE_DISPATCH(AddRows<A, false>);
    const auto add_squares = GRADFUSE_DISPATCH(AddRows<A, true>);
    const auto write = args_.relu != 0 ? GRADFUSE_DISPATCH(WriteRows<A, true>) : GRADFUSE_DISPATCH(WriteRows<A, false>);
    parallel_(CeilDiv(planes_.channels, kChannelsPerPanel), Cost(), [&](int64_t panel) {
      const int64_t first = panel * kChannelsPerPanel;
      const int64_t width = std::min(kChannelsPerPanel, planes_.channels - first);
      const NormPlanes<A> rows = Planes(first, planes_.batch, width);
      float centres[kChannelsPerPanel];
      for (int64_t c = 0; c < width; ++c) centres[c] = CentreOf(first + c);
      double sums[kChannelsPerPanel] = {};
      add(rows, centres, sums);
      double means[kChannelsPerPanel];
      for (int64_t c = 0; c < width; ++c) {
        means[c] = MeanOf(first + c, sums[c]);
        centres[c] = static_cast<float>(means[c]);
      }
      double squares[kChannelsPerPanel] = {};
      add_squares(rows, centres, squares);
      float scales[kChannelsPerPanel];
      float offsets[kChannelsPerPanel];
      for (int64_t c = 0; c < width; ++c) {
        const NormFactors factors = Finish(first + c, means[c], squares[c]);
        scales[c] = factors.scale;
        offsets[c] = factors.offset;
      }
      write(rows, centres, scales, offsets);
    });
  }

  const BatchNormArgs& args_;
  const ParallelFor& parallel_;
  const ChannelPlanes planes_;
};

}  // namespace

void Run(const BatchNormArgs& args, const ParallelFor& parallel) {
  WithActivationTypes<true>(args.input.dtype, args.save_mean.dtype,
                            [&](auto a, auto t) { Kernel<decltype(a), decltype(t)>(args, parallel).Run(); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
