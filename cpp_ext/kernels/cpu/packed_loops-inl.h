// The loops of convolutions: packing, and products along packed planes. Included once for each instruction set.
#if defined(GRADFUSE_PACKED_LOOPS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADFUSE_PACKED_LOOPS_INL_H
#undef GRADFUSE_PACKED_LOOPS_INL_H
#else
#define GRADFUSE_PACKED_LOOPS_INL_H
#endif

#include <algorithm>
#include <type_traits>

#include "kernels/cpu/packed_loops.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {

// Copies `rows` rows of `width` elements that lie `step` apart, and returns 0, or NaN if one of them is not finite.
template <class T>
T PackRows(const T* from, int64_t from_pitch, int64_t step, int64_t rows, int64_t width, T* to, int64_t to_pitch) {
  const TagOf<T> d;
  const auto zero = hn::Zero(d);
  auto check = zero;
  if (step == 1) {
    if (from_pitch == width && to_pitch == width) {
      width *= rows;
      rows = 1;
    }
    for (int64_t row = 0; row < rows; ++row, from += from_pitch, to += to_pitch) {
      ForEachVector(d, width, [&](int64_t i, auto at) HWY_ATTR {
        const auto value = Load(at, d, from + i);
        check = hn::MulAdd(value, zero, check);
        Store(at, value, d, to + i);
      });
    }
    return hn::ReduceSum(d, check);
  }
#if GRADFUSE_HAS_VECTORS
  if (step == 2) {
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (int64_t row = 0; row < rows; ++row, from += from_pitch, to += to_pitch) {
      ForEachVector(d, width, [&](int64_t i, auto at) HWY_ATTR {
        // The last element of a row has no neighbour.
        const int64_t there = 2 * (width - i) - 1;
        const auto low = hn::LoadN(d, from + 2 * i, static_cast<size_t>(std::min(there, lanes)));
        const auto high = there > lanes
                              ? hn::LoadN(d, from + 2 * i + lanes, static_cast<size_t>(std::min(there - lanes, lanes)))
                              : zero;
        const auto value = hn::ConcatEven(d, high, low);
        check = hn::MulAdd(value, zero, check);
        Store(at, value, d, to + i);
      });
    }
    return hn::ReduceSum(d, check);
  }
#endif
  T sum = 0;
  for (int64_t row = 0; row < rows; ++row, from += from_pitch, to += to_pitch) {
    for (int64_t i = 0; i < width; ++i) {
      to[i] = from[i * step];
      sum += to[i] * 0;
    }
  }
  return sum + hn::ReduceSum(d, check);
}

#if GRADFUSE_HAS_VECTORS
// Adds up the blocks of 16 bytes of a vector.
template <class D>
GRADFUSE_INLINE auto SumOfBlocks(D d, hn::Vec<D> value) {
  if constexpr (hn::MaxLanes(d) * sizeof(hn::TFromD<D>) <= 16) {
    return value;
  } else {
    const hn::Half<D> half;
    return SumOfBlocks(half, hn::LowerHalf(half, value) + hn::UpperHalf(half, value));
  }
}
#endif

// Writes the sums of the lanes of four vectors. Neighbours are added up while they are transposed.
template <class D, class T = hn::TFromD<D>>
GRADFUSE_INLINE void SumsOfFour(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c, hn::Vec<D> e, T* sums) {
#if GRADFUSE_HAS_VECTORS
  const auto ab = hn::InterleaveLower(d, a, b) + hn::InterleaveUpper(d, a, b);
  const auto ce = hn::InterleaveLower(d, c, e) + hn::InterleaveUpper(d, c, e);
  constexpr size_t kBlock = 16 / sizeof(T);
  const hn::FixedTag<T, kBlock> block;
  if constexpr (sizeof(T) == 4) {
    const hn::RepartitionToWide<D> pairs;
    const auto low = hn::InterleaveLower(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, ce));
    const auto high = hn::InterleaveUpper(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, ce));
    hn::StoreU(SumOfBlocks(d, hn::BitCast(d, low) + hn::BitCast(d, high)), block, sums);
  } else {
    hn::StoreU(SumOfBlocks(d, ab), block, sums);
    hn::StoreU(SumOfBlocks(d, ce), block, sums + kBlock);
  }
#else
  (void)d;
  sums[0] = a;
  sums[1] = b;
  sums[2] = c;
  sums[3] = e;
#endif
}

constexpr int kColumns = static_cast<int>(kColumnsAtOnce);
// As many rows as leave registers for the factors: 24 sums of 32 registers, 12 of 16.
#if GRADFUSE_AVX512 || defined(__aarch64__)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif

// Some places of a segment, or those of several segments.
struct Places {
  int64_t offset;
  int64_t count;
  int64_t segments;
  int64_t segment_pitch;
};

// Adds the products of kTileRows rows with six columns, over some places, to sums.
template <bool kPairs, int kTileRows, class T>
GRADFUSE_INLINE void AddTile(const T* rows, int64_t row_pitch, const T* const* columns, const Places& places,
                             bool is_first, int64_t columns_there, T* sums, int64_t sums_pitch) {
  const TagOf<T> d;
  using V = hn::Vec<TagOf<T>>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  V sum[kTileRows][kColumns];
  for (auto& line : sum) {
    for (V& one : line) one = hn::Zero(d);
  }
  const T* const c0 = columns[0];
  const T* const c1 = columns[1];
  const T* const c2 = columns[2];
  const T* const c3 = columns[3];
  const T* const c4 = columns[4];
  const T* const c5 = columns[5];
  const auto add = [&](int64_t i, auto at) HWY_ATTR {
    V row[kTileRows];
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r) {
      row[r] = Load(at, d, rows + r * row_pitch + i);
      KeepInRegister(row[r]);
    }
    const T* const from[kColumns] = {c0 + i, c1 + i, c2 + i, c3 + i, c4 + i, c5 + i};
#pragma GCC unroll 6
    for (int c = 0; c < kColumns; ++c) {
      V column = Load(at, d, from[c]);
      KeepInRegister(column);
#pragma GCC unroll 4
      for (int r = 0; r < kTileRows; ++r) sum[r][c] = AddProduct<kPairs>(row[r], column, sum[r][c]);
    }
  };
  int64_t begin = places.offset;
  for (int64_t segment = 0; segment < places.segments; ++segment, begin += places.segment_pitch) {
    const int64_t end = begin + places.count;
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) add(i, Whole());
    if (i < end) add(i, Part{static_cast<size_t>(end - i)});
  }
  // A tile's sums lie one after the other, with nothing after the last.
  T flat[kTileRows * kColumns + 2];
  V none = hn::Zero(d);
#pragma GCC unroll 6
  for (int one = 0; one < kTileRows * kColumns; one += 4) {
    const auto get = [&](int index) HWY_ATTR {
      return index < kTileRows * kColumns ? sum[index / kColumns][index % kColumns] : none;
    };
    SumsOfFour(d, get(one), get(one + 1), get(one + 2), get(one + 3), flat + one);
  }
  for (int64_t r = 0; r < kTileRows; ++r) {
    for (int64_t c = 0; c < columns_there; ++c) {
      T& to = sums[r * sums_pitch + c];
      to = is_first ? flat[r * kColumns + c] : to + flat[r * kColumns + c];
    }
  }
}

template <bool kPairs, class T>
GRADFUSE_INLINE void AddTileAt(const Products<T>& products, int64_t row, int64_t column, const Places& places,
                               bool is_first) {
  const T* const rows = products.rows + row * products.row_pitch;
  const T* const* const columns = products.columns + column;
  const int64_t there = std::min<int64_t>(kColumns, products.column_count - column);
  T* const sums = products.sums + row * products.sums_pitch + column;
  const auto add = [&](auto tile_rows) HWY_ATTR {
    AddTile<kPairs, decltype(tile_rows)::value>(rows, products.row_pitch, columns, places, is_first, there, sums,
                                                products.sums_pitch);
  };
  switch (std::min<int64_t>(kRows, products.row_count - row)) {
    case 1: add(std::integral_constant<int, 1>()); break;
    // NOLINTNEXTLINE(bugprone-branch-clone): they differ where there are registers for more than two rows
    case 2: add(std::integral_constant<int, 2>()); break;
    case 3: add(std::integral_constant<int, std::min(3, kRows)>()); break;
    default: add(std::integral_constant<int, kRows>()); break;
  }
}

template <bool kPairs, class T>
void AddTiles(const Products<T>& products, const Places& places, bool is_first) {
  if (products.columns_first) {
    for (int64_t column = 0; column < products.column_count; column += kColumns) {
      for (int64_t row = 0; row < products.row_count; row += kRows) {
        AddTileAt<kPairs>(products, row, column, places, is_first);
      }
    }
  } else {
    for (int64_t row = 0; row < products.row_count; row += kRows) {
      for (int64_t column = 0; column < products.column_count; column += kColumns) {
        AddTileAt<kPairs>(products, row, column, places, is_first);
      }
    }
  }
}

// The products of all rows with all columns over places [0, count) of each segment, about `part` places after the
// other, so that what tiles share is in the cache. With is_first the sums are set, and else added to.
template <bool kPairs, class T>
void AddProductsOf(const Products<T>& products, int64_t count, int64_t segments, int64_t part, bool is_first) {
  if (segments == 1) {
    for (int64_t offset = 0; offset < count; offset += part) {
      AddTiles<kPairs>(products, {offset, std::min(part, count - offset), 1, 0}, is_first && offset == 0);
    }
    return;
  }
  const int64_t together = std::max<int64_t>(1, part / count);
  for (int64_t first = 0; first < segments; first += together) {
    AddTiles<kPairs>(
        products, {first * products.segment_pitch, count, std::min(together, segments - first), products.segment_pitch},
        is_first && first == 0);
  }
}

template <class T>
void AddProducts(const Products<T>& products, int64_t count, int64_t segments, int64_t part, bool is_first) {
  if constexpr (kMultipliesPairs && std::is_same_v<T, float>) {
    if (products.pairs) return AddProductsOf<true>(products, count, segments, part, is_first);
  }
  AddProductsOf<false>(products, count, segments, part, is_first);
}

constexpr int kTaps = static_cast<int>(kTapsAtOnce);

// Adds the products of rows of `width` elements with the same places of up to nine planes. Returns 0, or NaN if an
// element of the rows is not finite.
template <class T>
T AddTaps(const T* rows, int64_t row_count, int64_t width, const T* const* planes, int64_t pitch, int64_t taps,
          T* sums) {
  const TagOf<T> d;
  using V = hn::Vec<TagOf<T>>;
  V sum[kTaps];
  for (V& one : sum) one = hn::Zero(d);
  const T* from[kTaps];
  for (int tap = 0; tap < kTaps; ++tap) from[tap] = planes[std::min<int64_t>(tap, taps - 1)];
  V check = hn::Zero(d);
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t row = 0; row < row_count; ++row) {
    // One body for whole vectors and the last, so that the sums stay in registers from one to the other.
    for (int64_t i = 0; i < width; i += lanes) {
      const V value = hn::LoadN(d, rows + row * width + i, static_cast<size_t>(std::min(lanes, width - i)));
      check = hn::MulAdd(value, hn::Zero(d), check);
#pragma GCC unroll 9
      for (int tap = 0; tap < kTaps; ++tap) {
        // What is behind the end of a row is finite, and multiplied with 0.
        sum[tap] = hn::MulAdd(value, hn::LoadU(d, from[tap] + row * pitch + i), sum[tap]);
      }
    }
  }
  for (int64_t tap = 0; tap < taps; ++tap) sums[tap] += hn::ReduceSum(d, sum[tap]);
  return hn::ReduceSum(d, check);
}

// Channels of a tile: with three vectors of places, 24 sums of 32 registers, 12 of 16.
#if GRADFUSE_AVX512 || defined(__aarch64__)
constexpr int kTileChannels = 8;
#else
constexpr int kTileChannels = 4;
#endif

// One tile of AddFilters, of the channels from `first` on: kVectors vectors of places, or less at the end.
template <bool kPairs, int kChannels, bool kByChannel, int kVectors, class T>
GRADFUSE_INLINE void AddFiltersAt(const Filters<T>& filters, int64_t first, int64_t place) {
  const TagOf<T> d;
  using V = hn::Vec<TagOf<T>>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  V sum[kChannels][kVectors];
  for (auto& line : sum) {
    for (V& one : line) one = hn::Zero(d);
  }
  const int64_t channel_pitch = kByChannel ? filters.weight_pitch : 1;
  const T* weight = filters.weights + first * channel_pitch;
  const T* plane = filters.planes + place;
  constexpr int64_t kTapPitch = kByChannel ? 1 : kChannelsAtOnce;
  const int64_t skip = filters.weight_skip * kTapPitch;
  for (int64_t m = 0; m < filters.plane_count; ++m, plane += filters.plane_pitch, weight += skip) {
    for (int64_t tap = 0; tap < filters.tap_count; ++tap, weight += kTapPitch) {
      const T* const from = plane - filters.shifts[tap];
      V value[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        V one = hn::LoadU(d, from + v * lanes);
        KeepInRegister(one);
        value[v] = one;
      }
#pragma GCC unroll 8
      for (int c = 0; c < kChannels; ++c) {
        V factor = hn::Set(d, weight[c * channel_pitch]);
        KeepInRegister(factor);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[c][v] = AddProduct<kPairs>(factor, value[v], sum[c][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < kChannels; ++c) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(sum[c][v], d, filters.sums + (first + c) * filters.sums_pitch + place + v * lanes);
    }
  }
}

// Packs the weights of a tile. Returns 0, or NaN if one of them is not finite.
template <class T>
T PackFilters(const FilterTile<T>& tile) {
  const TagOf<T> d;
  auto check = hn::Zero(d);
  const T* from = tile.weights;
  for (int64_t m = 0; m < tile.small_channels; ++m, from += tile.pitch) {
    ForEachVector(d, tile.count,
                  [&](int64_t i, auto at) HWY_ATTR { check = hn::MulAdd(Load(at, d, from + i), hn::Zero(d), check); });
    T* plane = tile.packed;
    int64_t begin = 0;
    for (int64_t p = 0; p < tile.plane_count; ++p) {
      const int64_t count = tile.plane_ends[p] - begin;
      T* const to = plane + m * count;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = tile.order[begin + i];
        to[i] = place < 0 ? T{} : from[place];
      }
      begin += count;
      plane += tile.small_channels * count;
    }
  }
  return hn::ReduceSum(d, check);
}

// Sums over planes and taps of a weight times the plane, shifted by the tap. Up to a vector more of places than there
// are get sums that mean nothing.
template <bool kPairs, int kChannels, bool kByChannel, class T>
void AddFiltersOf(const Filters<T>& filters, int64_t first) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(TagOf<T>()));
  int64_t place = 0;
  for (int64_t left = CeilDiv(filters.place_count, lanes); left > 0;) {
    int64_t taken = left;
    if constexpr (kChannels == 1) {
      // As many sums as hide how long one takes.
      taken = left >= 8 ? 8 : left >= 4 ? 4 : std::min<int64_t>(left, 2);
    } else {
      // A tile of one vector loads a factor for each product: four vectors are two tiles of two.
      taken = left == 2 || left == 4 ? 2 : std::min<int64_t>(left, 3);
    }
    switch (taken) {
      case 1: AddFiltersAt<kPairs, kChannels, kByChannel, 1>(filters, first, place); break;
      case 2: AddFiltersAt<kPairs, kChannels, kByChannel, 2>(filters, first, place); break;
      case 3: AddFiltersAt<kPairs, kChannels, kByChannel, 3>(filters, first, place); break;
      default:
        if constexpr (kChannels == 1) {
          taken == 4 ? AddFiltersAt<kPairs, kChannels, kByChannel, 4>(filters, first, place)
                     : AddFiltersAt<kPairs, kChannels, kByChannel, 8>(filters, first, place);
        }
    }
    left -= taken;
    place += taken * lanes;
  }
}

// The same for eight channels, or one.
template <bool kPairs, class T>
void AddFiltersOfTile(const Filters<T>& filters, bool is_single) {
  if (is_single) {
    AddFiltersOf<kPairs, 1, true>(filters, 0);
    return;
  }
  for (int64_t first = 0; first < kChannelsAtOnce; first += kTileChannels) {
    if (filters.weight_pitch == 0) {
      AddFiltersOf<kPairs, kTileChannels, false>(filters, first);
    } else {
      AddFiltersOf<kPairs, kTileChannels, true>(filters, first);
    }
  }
}

template <class T>
void AddFilters(const Filters<T>& filters, bool is_single) {
  if constexpr (kMultipliesPairs && std::is_same_v<T, float>) {
    if (filters.pairs) return AddFiltersOfTile<true>(filters, is_single);
  }
  AddFiltersOfTile<false>(filters, is_single);
}

// Up to a vector behind each piece, and so behind the panel, is written to, too.
template <class T>
void CopyPanel(const Panel<T>& panel) {
  const TagOf<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* plane = panel.planes;
  T* to = panel.to;
  for (int64_t m = 0; m < panel.plane_count; ++m, plane += panel.plane_pitch) {
    for (int64_t tap = 0; tap < panel.tap_count; ++tap, to += kPanel) {
      const T* const from = plane - panel.shifts[tap];
      for (int64_t one = 0; one < panel.piece_count; ++one) {
        const Piece& piece = panel.pieces[one];
        for (int64_t i = 0; i < piece.count; i += lanes) {
          hn::StoreU(hn::LoadU(d, from + piece.from + i), d, to + piece.to + i);
        }
      }
    }
  }
}

// Packs rows of items side by side. Returns 0, or NaN if an element is not finite.
template <class T>
T PackItems(const ItemRows<const T, T>& rows) {
  T check = 0;
  int64_t n = 0;
  const auto pack_one = [&](int64_t item, int64_t x) {
    const T value = rows.rows[item * rows.item_pitch + x * rows.step];
    check += value * 0;
    rows.packed[x * rows.at_once + item] = value;
  };
#if GRADFUSE_HAS_VECTORS
  const BlockTag<T> d;
  constexpr int kBlock = 16 / sizeof(T);
  auto checks = hn::Zero(d);
  // With a step of 2 a block reads one element more than it takes.
  const int64_t width = rows.step == 1 ? rows.width : rows.width - 1;
  for (; rows.step <= 2 && n + kBlock <= rows.items; n += kBlock) {
    int64_t x = 0;
    for (; x + kBlock <= width; x += kBlock) {
      hn::Vec<BlockTag<T>> block[kBlock];
#pragma GCC unroll 4
      for (int i = 0; i < kBlock; ++i) {
        const T* const from = rows.rows + (n + i) * rows.item_pitch + x * rows.step;
        __builtin_prefetch(from + rows.ahead);
        block[i] = hn::LoadU(d, from);
        if (rows.step == 2) block[i] = hn::ConcatEven(d, hn::LoadU(d, from + kBlock), block[i]);
        checks = hn::MulAdd(block[i], hn::Zero(d), checks);
      }
      Transpose(d, block);
#pragma GCC unroll 4
      for (int i = 0; i < kBlock; ++i) hn::StoreU(block[i], d, rows.packed + (x + i) * rows.at_once + n);
    }
    for (; x < rows.width; ++x) {
      for (int64_t i = 0; i < kBlock; ++i) pack_one(n + i, x);
    }
  }
  check += hn::ReduceSum(d, checks);
#endif
  for (; n < rows.items; ++n) {
    for (int64_t x = 0; x < rows.width; ++x) pack_one(n, x);
  }
  return check;
}

// Writes packed sums plus `bias` to rows of items. Returns whether all are finite.
template <class T>
bool WriteItems(const ItemRows<T, const T>& rows, const Finish<T>& finish) {
  T check = 0;
  int64_t n = 0;
  const auto write_one = [&](int64_t item, int64_t x) {
    const T value = rows.packed[x * rows.at_once + item] + finish.bias;
    check += value * 0;
    rows.rows[item * rows.item_pitch + x * rows.step] = value < finish.least ? finish.least : value;
  };
#if GRADFUSE_HAS_VECTORS
  const BlockTag<T> d;
  constexpr int kBlock = 16 / sizeof(T);
  const auto added = hn::Set(d, finish.bias);
  const auto least = hn::Set(d, finish.least);
  auto checks = hn::Zero(d);
  for (; rows.step == 1 && n + kBlock <= rows.items; n += kBlock) {
    int64_t x = 0;
    for (; x + kBlock <= rows.width; x += kBlock) {
      hn::Vec<BlockTag<T>> block[kBlock];
#pragma GCC unroll 4
      for (int i = 0; i < kBlock; ++i) {
        const auto value = hn::LoadU(d, rows.packed + (x + i) * rows.at_once + n) + added;
        checks = hn::MulAdd(value, hn::Zero(d), checks);
        // NaN is less than nothing, and stays.
        block[i] = hn::IfThenElse(value < least, least, value);
      }
      Transpose(d, block);
#pragma GCC unroll 4
      for (int i = 0; i < kBlock; ++i) {
        T* const to = rows.rows + (n + i) * rows.item_pitch + x;
        __builtin_prefetch(to + rows.ahead, /*rw=*/1);
        hn::StoreU(block[i], d, to);
      }
    }
    for (; x < rows.width; ++x) {
      for (int64_t i = 0; i < kBlock; ++i) write_one(n + i, x);
    }
  }
  check += hn::ReduceSum(d, checks);
#endif
  for (; n < rows.items; ++n) {
    for (int64_t x = 0; x < rows.width; ++x) write_one(n, x);
  }
  return check == 0;
}

// Writes `rows` rows of sums plus `bias`. Returns whether all are finite.
template <class T>
bool WriteRows(const T* from, int64_t from_pitch, int64_t rows, int64_t width, const Finish<T>& finish, T* to) {
  const TagOf<T> d;
  const auto zero = hn::Zero(d);
  const auto added = hn::Set(d, finish.bias);
  const auto least = hn::Set(d, finish.least);
  auto check = zero;
  if (from_pitch == width) {
    width *= rows;
    rows = 1;
  }
  for (int64_t row = 0; row < rows; ++row, from += from_pitch, to += width) {
    ForEachVector(d, width, [&](int64_t i, auto at) HWY_ATTR {
      const auto value = Load(at, d, from + i) + added;
      check = hn::MulAdd(value, zero, check);
      // NaN is less than nothing, and stays.
      Store(at, hn::IfThenElse(value < least, least, value), d, to + i);
    });
  }
  return hn::ReduceSum(d, check) == 0;
}

}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
