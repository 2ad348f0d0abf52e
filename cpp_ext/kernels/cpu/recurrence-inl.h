// Products of a few rows with packed weights, for the steps of recurrent layers. Included once for each instruction
// set.
#if defined(GRADFUSE_RECURRENCE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADFUSE_RECURRENCE_INL_H
#undef GRADFUSE_RECURRENCE_INL_H
#else
#define GRADFUSE_RECURRENCE_INL_H
#endif

#include <algorithm>
#include <type_traits>

#include "kernels/cpu/vector_math-inl.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {

// Recurrent layers are computed in float32, in vectors of this type.
using RowTag = hn::ScalableTag<float>;
inline constexpr auto kRowLanes = static_cast<int64_t>(hn::MaxLanes(RowTag()));

// How many rows are multiplied with vectors of a panel at once: their sums are in registers.
template <int kVectors>
constexpr int RowsAtOnce() {
#if GRADFUSE_AVX512 || (GRADFUSE_HAS_VECTORS && defined(__aarch64__))
  return kVectors == 4 ? 6 : 8;
#else
  return kVectors == 4 ? 2 : 4;
#endif
}
inline constexpr int64_t kMostRowsAtOnce = 8;

inline int64_t RowLanes() { return kRowLanes; }

// sums(row, vector) = the sum over k of rows(row, k) panel(k, vector), for kRows rows that lie `pitch` apart.
template <int kRows, int kVectors>
void MultiplyTile(const float* rows, int64_t pitch, int64_t depth, const float* panel, float* sums) {
  const RowTag d;
  hn::Vec<RowTag> total[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) total[row][v] = hn::Zero(d);
  }
  for (int64_t k = 0; k < depth; ++k, panel += kVectors * kRowLanes) {
    hn::Vec<RowTag> weights[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = hn::LoadU(d, panel + v * kRowLanes);
      KeepInRegister(weights[v]);
    }
    for (int row = 0; row < kRows; ++row) {
      const auto factor = hn::Set(d, rows[row * pitch + k]);
      for (int v = 0; v < kVectors; ++v) total[row][v] = hn::MulAdd(factor, weights[v], total[row][v]);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) hn::StoreU(total[row][v], d, sums + (row * kVectors + v) * kRowLanes);
  }
}

// The same for any number of rows up to kRows.
template <int kRows, int kVectors>
void MultiplyUpTo(int64_t count, const float* rows, int64_t pitch, int64_t depth, const float* panel, float* sums) {
  if constexpr (kRows > 1) {
    if (count < kRows) return MultiplyUpTo<kRows - 1, kVectors>(count, rows, pitch, depth, panel, sums);
  }
  MultiplyTile<kRows, kVectors>(rows, pitch, depth, panel, sums);
}

// Calls use(row, sums) for the products of each of `count` rows with a panel; without rows (null) they are 0.
template <int kVectors, class Use>
GRADFUSE_INLINE void MultiplyRows(int64_t count, const float* rows, int64_t pitch, int64_t depth, const float* panel,
                                  const Use& use) {
  alignas(64) float sums[kMostRowsAtOnce * kVectors * kRowLanes];
  if (rows == nullptr) {
    std::fill(sums, sums + kVectors * kRowLanes, 0.0f);
    for (int64_t row = 0; row < count; ++row) use(row, sums);
    return;
  }
  constexpr int64_t kMost = RowsAtOnce<kVectors>();
  const int64_t tiles = (count + kMost - 1) / kMost;
  int64_t row = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    // Of about the same size, as few rows wait for the results of their own additions.
    const int64_t end = count * (tile + 1) / tiles;
    MultiplyUpTo<kMost, kVectors>(end - row, rows + row * pitch, pitch, depth, panel, sums);
    for (int64_t r = row; r < end; ++r) use(r, sums + (r - row) * kVectors * kRowLanes);
    row = end;
  }
}

// Packs weight (gates units, units) for products with its rows: in panel p, at k, are the weights of the units
// p lanes, ... of each gate for unit k of the state; 0 where there are no units any more.
template <class T, int kGates>
void PackByUnits(const T* weight, int64_t units, int64_t p, float* panels) {
  constexpr int64_t kPitch = kGates * kRowLanes;
  float* panel = panels + p * units * kPitch;
  const int64_t there = std::min<int64_t>(kRowLanes, units - p * kRowLanes);
  for (int gate = 0; gate < kGates; ++gate) {
    float* const to = panel + gate * kRowLanes;
    const T* const from = weight + (gate * units + p * kRowLanes) * units;
    const auto pack_one = [&](int64_t lane, int64_t k) {
      to[k * kPitch + lane] = lane < there ? ToCompute(from[lane * units + k]) : 0.0f;
    };
    int64_t lane = 0;
#if GRADFUSE_HAS_VECTORS
    if constexpr (std::is_same_v<T, float>) {
      const BlockTag<float> d;
      constexpr int kBlock = 4;
      for (; lane + kBlock <= there; lane += kBlock) {
        int64_t k = 0;
        for (; k + kBlock <= units; k += kBlock) {
          hn::Vec<BlockTag<float>> block[kBlock];
          for (int i = 0; i < kBlock; ++i) block[i] = hn::LoadU(d, from + (lane + i) * units + k);
          Transpose(d, block);
          for (int i = 0; i < kBlock; ++i) hn::StoreU(block[i], d, to + (k + i) * kPitch + lane);
        }
        for (; k < units; ++k) {
          for (int i = 0; i < kBlock; ++i) pack_one(lane + i, k);
        }
      }
    }
#endif
    for (; lane < kRowLanes; ++lane) {
      for (int64_t k = 0; k < units; ++k) pack_one(lane, k);
    }
  }
}

// How many vectors of units are neighbours in a panel of gradients.
inline constexpr int kGradientVectors = 3;

inline int64_t GradientPanelUnits() { return kGradientVectors * kRowLanes; }

// Packs weight (depth, units) for products with its columns: in panel p, at k, are those of the units from
// p GradientPanelUnits() on. The last panel has as many vectors as there are units for.
template <class T>
void PackColumns(const T* weight, int64_t depth, int64_t units, int64_t p, float* panels) {
  const int64_t first = p * GradientPanelUnits();
  const int64_t there = std::min<int64_t>(GradientPanelUnits(), units - first);
  const int64_t width = (there + kRowLanes - 1) / kRowLanes * kRowLanes;
  float* to = panels + first * depth;
  for (int64_t k = 0; k < depth; ++k, to += width) {
    const T* from = weight + k * units + first;
    for (int64_t unit = 0; unit < width; ++unit) to[unit] = unit < there ? ToCompute(from[unit]) : 0.0f;
  }
}

// Calls use(row, sums) for the products of rows with a panel of gradients, of which `there` units are there.
template <class Use>
GRADFUSE_INLINE void MultiplyGradients(int64_t there, int64_t count, const float* rows, int64_t depth,
                                       const float* panel, const Use& use) {
  static_assert(kGradientVectors == 3, "a case for each");
  switch ((there + kRowLanes - 1) / kRowLanes) {
    case 1: return MultiplyRows<1>(count, rows, depth, depth, panel, use);
    case 2: return MultiplyRows<2>(count, rows, depth, depth, panel, use);
    default: return MultiplyRows<3>(count, rows, depth, depth, panel, use);
  }
}

// Calls use(row, unit, sum, at) for the vectors of a panel of gradients in some rows: `sum` is what comes from `later`,
// the gradient (N, depth) of the gates of the step behind; 0 if that is null.
template <class Use>
GRADFUSE_INLINE void ForEachOfPanel(int64_t units, int64_t depth, const float* later, const float* panels,
                                    int64_t panel, int64_t first_row, int64_t rows, const Use& use) {
  const RowTag d;
  const int64_t first = panel * GradientPanelUnits();
  const int64_t there = std::min(GradientPanelUnits(), units - first);
  const float* from = later == nullptr ? nullptr : later + first_row * depth;
  MultiplyGradients(there, rows, from, depth, panels + first * depth, [&](int64_t row, const float* sums) HWY_ATTR {
    ForEachVector(d, there, [&](int64_t unit, auto at) HWY_ATTR {
      use(first_row + row, first + unit, hn::LoadU(d, sums + unit), at);
    });
  });
}

}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
