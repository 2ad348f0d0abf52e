// Products with parts of a weight of few bits in floats. Included once for each instruction set.
#if defined(GRADFUSE_PACKED_WEIGHT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADFUSE_PACKED_WEIGHT_INL_H
#undef GRADFUSE_PACKED_WEIGHT_INL_H
#else
#define GRADFUSE_PACKED_WEIGHT_INL_H
#endif

#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {

using FloatTag = hn::ScalableTag<float>;
// Vectors of a tile: with a third as many registers again for a row of the weight, all there are.
constexpr int64_t kTileVectors = hn::MaxLanes(FloatTag()) == 8 ? 2 : 4;

// Writes the numbers of a part as floats, with kPanel from one row to the next: the first number of each byte, then the
// second of each, as they are together in vectors.
template <class T, int kBits>
void Dequantize(const PackedPart& part, const T* scales, float* to) {
  constexpr int kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  const int64_t count = part.columns / kPerByte;
  for (int64_t row = 0; row < part.rows; ++row) {
    const uint8_t* const bytes = part.numbers + row * part.number_pitch;
    // They are far from each other: the processor does not see by itself what comes in the next part.
    Prefetch(FloatTag(), bytes + part.numbers_ahead);
    Prefetch(FloatTag(), scales + part.scale + row * part.scale_pitch + part.scales_ahead);
    int zero_point = 1 << (kBits - 1);
    if (part.zero_points != nullptr) {
      zero_point = (part.zero_points[row * part.zero_point_pitch] >> part.zero_point_shift) & kMask;
    }
    const float scale = ToCompute(scales[part.scale + row * part.scale_pitch]);
    float* const out = to + row * kPanel;
#if GRADFUSE_HAS_VECTORS
    const FloatTag d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    if (count % lanes == 0) {
      const hn::RebindToSigned<FloatTag> integers;
      const auto mask = hn::Set(integers, kMask);
      const auto zero = hn::Set(integers, zero_point);
      const auto factor = hn::Set(d, scale);
      for (int64_t i = 0; i < count; i += lanes) {
        auto left = hn::PromoteTo(integers, hn::LoadU(hn::Rebind<uint8_t, FloatTag>(), bytes + i));
        for (int k = 0; k < kPerByte; ++k) {
          hn::StoreU(hn::ConvertTo(d, (left & mask) - zero) * factor, d, out + k * count + i);
          left = hn::ShiftRight<kBits>(left);
        }
      }
      continue;
    }
#endif
    for (int64_t i = 0; i < count; ++i) {
      for (int k = 0; k < kPerByte; ++k) {
        out[k * count + i] = static_cast<float>(((bytes[i] >> (k * kBits)) & kMask) - zero_point) * scale;
      }
    }
  }
}

// Copies rows of what is multiplied, `depth` numbers each, with kDeep from one to the next.
template <class T>
void Pack(const T* from, int64_t pitch, int64_t rows, int64_t depth, float* to) {
  const FloatTag d;
  for (int64_t row = 0; row < rows; ++row) {
    ForEachVector(d, depth, [&](int64_t i, auto at) HWY_ATTR {
      Store(at, Load(at, d, from + row * pitch + i), d, to + row * kDeep + i);
    });
  }
}

template <int64_t kRows>
GRADFUSE_INLINE void AddTile(const float* left, const float* weight, int64_t depth, float* sums) {
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<FloatTag> tile[kRows][kTileVectors];
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kTileVectors; ++v) tile[r][v] = hn::Zero(d);
  }
  for (int64_t k = 0; k < depth; ++k) {
    hn::Vec<FloatTag> row[kTileVectors];
    for (int64_t v = 0; v < kTileVectors; ++v) row[v] = hn::LoadU(d, weight + k * kPanel + v * lanes);
    for (int64_t r = 0; r < kRows; ++r) {
      const auto factor = hn::Set(d, left[r * kDeep + k]);
      for (int64_t v = 0; v < kTileVectors; ++v) tile[r][v] = hn::MulAdd(factor, row[v], tile[r][v]);
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kTileVectors; ++v) {
      float* const to = sums + r * kPanel + v * lanes;
      hn::StoreU(hn::LoadU(d, to) + tile[r][v], d, to);
    }
  }
}

// As AddTile, of what is left of rows: fewer than kTileRows.
template <int64_t kRows>
GRADFUSE_INLINE void AddLast(int64_t rows, const float* left, const float* weight, int64_t depth, float* sums) {
  if (rows == kRows) return AddTile<kRows>(left, weight, depth, sums);
  if constexpr (kRows > 1) AddLast<kRows - 1>(rows, left, weight, depth, sums);
}

// sums (rows, kPanel) += left (rows, depth) times weight (depth, kPanel).
inline void AddProducts(const float* left, const float* weight, int64_t rows, int64_t depth, float* sums) {
  const int64_t step = kTileVectors * static_cast<int64_t>(hn::Lanes(FloatTag()));
  for (int64_t column = 0; column < kPanel; column += step) {
    int64_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows) {
      AddTile<kTileRows>(left + row * kDeep, weight + column, depth, sums + row * kPanel + column);
    }
    AddLast<kTileRows - 1>(rows - row, left + row * kDeep, weight + column, depth, sums + row * kPanel + column);
  }
}

}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
