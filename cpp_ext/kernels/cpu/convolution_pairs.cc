#include "kernels/cpu/convolution_pairs.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "kernels/cpu/convolutions.h"
#include "kernels/cpu/packed_planes.h"
#include "kernels/cpu/targets.h"
#include "kernels/cpu/task_memory.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convolution_pairs.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

bool HasPairs() { return kMultipliesPairs; }

#if GRADFUSE_AVX512_BF16
// 0, or NaN in lanes where a number of a pair is not finite.
template <class D>
GRADFUSE_INLINE hn::Vec<D> Checked(D d, hn::Vec<D> pairs) {
  const hn::RebindToUnsigned<D> u;
  const auto first = hn::BitCast(d, hn::ShiftLeft<16>(hn::BitCast(u, pairs)));
  return hn::MulAdd(pairs, hn::Zero(d), hn::Mul(first, hn::Zero(d)));
}
#endif

// Pairs numbers with those that lie `distance` further on, or, if that is 0, with zeros. Returns whether all are
// finite.
template <class T>
// NOLINTNEXTLINE(readability-non-const-parameter): it is written to where there are pairs
bool Pair(const T* from, int64_t distance, int64_t count, float* to) {
#if GRADFUSE_AVX512_BF16
  const TagOf<float> d;
  auto check = hn::Zero(d);
  ForEachVector<Sweep>(d, count, [&](int64_t i, auto at) HWY_ATTR {
    const auto pairs = LoadPairs(at, d, from + i, distance == 0 ? nullptr : from + distance + i);
    check = check + Checked(d, pairs);
    at.StoreBits(pairs, d, to + i);
  });
  return hn::ReduceSum(d, check) == 0;
#else
  (void)from, (void)distance, (void)count, (void)to;
  return false;
#endif
}

// Pairs neighbours; behind an odd count with 0.
template <class T>
// NOLINTNEXTLINE(readability-non-const-parameter): as above
bool PairNeighbours(const T* from, int64_t count, float* to) {
#if GRADFUSE_AVX512_BF16
  constexpr int64_t kAtOnce = 8;
  const hn::FixedTag<float, 2 * kAtOnce> numbers;
  const hn::FixedTag<float, kAtOnce> d;
  auto check = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * kAtOnce <= count; i += 2 * kAtOnce) {
    const auto pairs = hn::BitCast(d, LoadBFloat16(Whole(), numbers, from + i));
    check = check + Checked(d, pairs);
    hn::StoreU(pairs, d, to + i / 2);
  }
  bool is_finite = hn::ReduceSum(d, check) == 0;
  for (; i < count; i += 2) is_finite &= Pair(from + i, i + 1 < count ? 1 : 0, 1, to + i / 2);
  return is_finite;
#else
  (void)from, (void)count, (void)to;
  return false;
#endif
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

constexpr int64_t kNumbersOfTask = 16384;

template <class T>
int64_t MovedBytes(int64_t numbers) {
  return numbers * static_cast<int64_t>(sizeof(T) + sizeof(BFloat16));
}

// Packs a factor of (count, channels, size) in pairs of channels, an odd one with zeros. Returns whether all numbers
// are finite.
template <class T>
bool PairChannelsOf(const T* from, int64_t count, int64_t channels, int64_t size, float* paired,
                    const ParallelFor& parallel) {
  const auto pair = GRADFUSE_DISPATCH(Pair<T>);
  const auto pair_neighbours = GRADFUSE_DISPATCH(PairNeighbours<T>);
  const int64_t pairs = CeilDiv(channels, 2);
  const int64_t rows_of_task = std::max<int64_t>(1, kNumbersOfTask / (channels * size));
  const int64_t pairs_of_task = std::max<int64_t>(1, kNumbersOfTask / (2 * size));
  const int64_t parts = CeilDiv(pairs, pairs_of_task);
  std::atomic<bool> all_finite{true};
  parallel(CeilDiv(count, rows_of_task) * parts, MovedBytes<T>(count * channels * size), [&](int64_t task) {
    const int64_t begin = task % parts * pairs_of_task;
    const int64_t end = std::min(pairs, begin + pairs_of_task);
    const int64_t first = task / parts * rows_of_task;
    bool is_finite = true;
    for (int64_t row = first; row < std::min(count, first + rows_of_task); ++row) {
      const T* const numbers = from + row * channels * size;
      float* const to = paired + row * pairs * size;
      if (size == 1) {
        is_finite &= pair_neighbours(numbers + 2 * begin, std::min(channels, 2 * end) - 2 * begin, to + begin);
        continue;
      }
      for (int64_t one = begin; one < end; ++one) {
        const int64_t distance = 2 * one + 1 < channels ? size : 0;
        is_finite &= pair(numbers + 2 * one * size, distance, size, to + one * size);
      }
    }
    if (!is_finite) all_finite = false;
  });
  return all_finite;
}

bool PairChannels(const Tensor& tensor, int64_t count, int64_t channels, int64_t size, float* paired,
                  const ParallelFor& parallel) {
  return WithShortFloatType(tensor.dtype, [&](auto type) {
    return PairChannelsOf(tensor.Data<decltype(type)>(), count, channels, size, paired, parallel);
  });
}

// The same of (count, size) in pairs of items.
template <class T>
bool PairItemsOf(const T* from, int64_t count, int64_t size, float* paired, const ParallelFor& parallel) {
  const auto pair = GRADFUSE_DISPATCH(Pair<T>);
  const int64_t parts = CeilDiv(size, kNumbersOfTask);
  std::atomic<bool> all_finite{true};
  parallel(CeilDiv(count, 2) * parts, MovedBytes<T>(count * size), [&](int64_t task) {
    const int64_t item = task / parts * 2;
    const int64_t begin = task % parts * kNumbersOfTask;
    const int64_t distance = item + 1 < count ? size : 0;
    const bool is_finite = pair(from + item * size + begin, distance, std::min(kNumbersOfTask, size - begin),
                                paired + item / 2 * size + begin);
    if (!is_finite) all_finite = false;
  });
  return all_finite;
}

bool PairItems(const Tensor& tensor, int64_t count, int64_t size, float* paired, const ParallelFor& parallel) {
  return WithShortFloatType(tensor.dtype, [&](auto type) {
    return PairItemsOf(tensor.Data<decltype(type)>(), count, size, paired, parallel);
  });
}

bool CanPair(const Geometry& g, int64_t paired) {
  return paired > 1 && GRADFUSE_DISPATCH(HasPairs)() && !IsEmpty(g) && CanPack(g);
}

Geometry PairedOver(const Geometry& g, int64_t Geometry::* number) {
  Geometry paired = g;
  paired.pairs = true;
  paired.*number = CeilDiv(g.*number, 2);
  return paired;
}

}  // namespace

PairedWeight::PairedWeight(const Geometry& g, const Tensor& weight, bool of_large, const ParallelFor& parallel) {
  const int64_t channels = of_large ? g.large_channels : g.small_channels;
  if (!CanPair(g, channels)) return;
  const int64_t count = of_large ? g.groups * g.small_channels : g.groups;
  const int64_t size = of_large ? g.kernel_size : g.large_channels * g.kernel_size;
  pairs_.emplace(count * CeilDiv(channels, 2) * size);
  is_there_ = PairChannels(weight, count, channels, size, pairs_->data(), parallel);
}

void ConvolutionOfPairs(const Geometry& g, const Tensor& large, const PairedWeight& weight, const float* bias,
                        bool relu, float* out, const ParallelFor& parallel) {
  const Geometry paired = PairedOver(g, &Geometry::large_channels);
  const KeptMemory<float> larges(g.batch * g.groups * paired.large_channels * g.large_size);
  PairChannels(large, g.batch * g.groups, g.large_channels, g.large_size, larges.data(), parallel);
  Convolution(paired, larges.data(), weight.data(), bias, relu, out, parallel);
}

void TransposedConvolutionOfPairs(const Geometry& g, const Tensor& small, const PairedWeight& weight, float* out,
                                  const ParallelFor& parallel) {
  const Geometry paired = PairedOver(g, &Geometry::small_channels);
  const KeptMemory<float> smalls(g.batch * g.groups * paired.small_channels * g.small_size);
  PairChannels(small, g.batch * g.groups, g.small_channels, g.small_size, smalls.data(), parallel);
  TransposedConvolution(paired, smalls.data(), weight.data(), out, parallel);
}

bool GradWeightOfPairs(const Geometry& g, const Tensor& small, const Tensor& large, float* out,
                       const ParallelFor& parallel) {
  if (!CanPair(g, g.batch) || (g.small_channels == 1 && g.large_channels == 1)) return false;
  const Geometry paired = PairedOver(g, &Geometry::batch);
  const int64_t small_item = g.groups * g.small_channels * g.small_size;
  const int64_t large_item = g.groups * g.large_channels * g.large_size;
  const KeptMemory<float> smalls(paired.batch * small_item);
  if (!PairItems(small, g.batch, small_item, smalls.data(), parallel)) return false;
  const KeptMemory<float> larges(paired.batch * large_item);
  if (!PairItems(large, g.batch, large_item, larges.data(), parallel)) return false;
  GradWeight(paired, smalls.data(), larges.data(), out, parallel);
  return true;
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
