#include "kernels/cpu/convolutions.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/convolution_geometry.h"
#include "kernels/cpu/convolution_direct.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convolutions.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_CONVOLUTIONS_SHARED
#define GRADFUSE_CONVOLUTIONS_SHARED
namespace gradfuse::cpu {
namespace {

// Rows and columns that are multiplied with each other, over places that lie one after the other.
template <class T>
struct Products {
  const T* rows;
  int64_t row_pitch;
  int64_t row_count;
  const T* const* columns;  // and kColumnsAtOnce - 1 more, which may be any of them
  int64_t column_count;
  bool columns_first;  // whether the columns of a tile stay in the cache while rows pass, not the other way round
  T* sums;             // (row_count, column_count), with a pitch
  int64_t sums_pitch;
};

// The weights of a tile of channels, and where they are packed to: plane by plane, and there by channel of the small
// side, tap of the plane and channel of the tile.
template <class T>
struct FilterTile {
  const T* weights;  // of the first channel of the small side: (channels, taps)
  int64_t pitch;     // from one channel of the small side to the next
  int64_t small_channels;
  int64_t count;              // of weights that are there
  const int64_t* order;       // the weight for each place of what is packed, or -1 for 0
  const int64_t* plane_ends;  // in `order`
  int64_t plane_count;
  T* packed;
};

// Planes that are added up, each shifted for each of some taps and multiplied with a weight.
template <class T>
struct Filters {
  const T* planes;
  int64_t plane_pitch;
  int64_t plane_count;
  const int64_t* shifts;
  int64_t tap_count;
  const T* weights;      // (plane_count, tap_count, channels at once), or (channels at once, plane_count, tap_count)
  int64_t weight_pitch;  // of the second form, from one channel to the next; 0 for the first
  int64_t place_count;
  T* sums;  // (channels at once, places), with a pitch
  int64_t sums_pitch;
};

// Neighbouring windows, where they are in packed planes, and where in a panel.
struct Piece {
  int64_t from;
  int64_t to;
  int64_t count;
};

// Windows that are copied out of packed planes: for each (plane, tap) a row of kPanel.
template <class T>
struct Panel {
  const T* planes;
  int64_t plane_pitch;
  int64_t plane_count;
  const int64_t* shifts;
  int64_t tap_count;
  const Piece* pieces;
  int64_t piece_count;
  T* to;
};

// What is done to the sums of a channel: a bias is added, and they are at least so much.
template <class T>
struct Finish {
  T bias;
  T least;
};

constexpr int64_t kChannelsAtOnce = 8;
constexpr int64_t kMostPlacesOfTile = 64;
constexpr int64_t kColumnsAtOnce = 6;
constexpr int64_t kTapsAtOnce = 9;
constexpr int64_t kPanel = 48;  // a whole number of tiles of AddFilters in each instruction set

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

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

// Writes the sums of the lanes of four vectors. Neighbours are added up while they are transposed.
template <class D, class T = hn::TFromD<D>>
GRADFUSE_INLINE void SumsOfFour(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c, hn::Vec<D> e, T* sums) {
#if GRADFUSE_HAS_VECTORS
  const auto ab = hn::InterleaveLower(d, a, b) + hn::InterleaveUpper(d, a, b);
  const auto ce = hn::InterleaveLower(d, c, e) + hn::InterleaveUpper(d, c, e);
  constexpr size_t kLanes = hn::MaxLanes(D());
  alignas(64) T parts[2 * kLanes];
  if constexpr (sizeof(T) == 4) {
    const hn::RepartitionToWide<D> pairs;
    const auto low = hn::InterleaveLower(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, ce));
    const auto high = hn::InterleaveUpper(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, ce));
    hn::StoreU(hn::BitCast(d, low) + hn::BitCast(d, high), d, parts);
    for (size_t i = 0; i < 4; ++i) sums[i] = parts[i];
    for (size_t block = 4; block < kLanes; block += 4) {
      for (size_t i = 0; i < 4; ++i) sums[i] += parts[block + i];
    }
  } else {
    hn::StoreU(ab, d, parts);
    hn::StoreU(ce, d, parts + kLanes);
    for (size_t i = 0; i < 4; ++i) sums[i] = parts[i / 2 * kLanes + i % 2];
    for (size_t block = 2; block < kLanes; block += 2) {
      for (size_t i = 0; i < 4; ++i) sums[i] += parts[i / 2 * kLanes + block + i % 2];
    }
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

// Adds the products of kTileRows rows with six columns, over `count` places, to sums.
template <int kTileRows, class T>
GRADFUSE_INLINE void AddTile(const T* rows, int64_t row_pitch, const T* const* columns, int64_t offset, int64_t count,
                             bool is_first, int64_t columns_there, T* sums, int64_t sums_pitch) {
  const TagOf<T> d;
  using V = hn::Vec<TagOf<T>>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  V sum[kTileRows][kColumns];
  for (auto& line : sum) {
    for (V& one : line) one = hn::Zero(d);
  }
  const T* const c0 = columns[0] + offset;
  const T* const c1 = columns[1] + offset;
  const T* const c2 = columns[2] + offset;
  const T* const c3 = columns[3] + offset;
  const T* const c4 = columns[4] + offset;
  const T* const c5 = columns[5] + offset;
  const auto add = [&](int64_t i, auto at) HWY_ATTR {
    V row[kTileRows];
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r) {
      row[r] = Load(at, d, rows + r * row_pitch + i);
      KeepInRegister(row[r]);
    }
    const T* const places[kColumns] = {c0 + i, c1 + i, c2 + i, c3 + i, c4 + i, c5 + i};
#pragma GCC unroll 6
    for (int c = 0; c < kColumns; ++c) {
      V column = Load(at, d, places[c]);
      KeepInRegister(column);
#pragma GCC unroll 4
      for (int r = 0; r < kTileRows; ++r) sum[r][c] = hn::MulAdd(row[r], column, sum[r][c]);
    }
  };
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) add(i, Whole());
  if (i < count) add(i, Part{static_cast<size_t>(count - i)});
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

template <class T>
GRADFUSE_INLINE void AddTileAt(const Products<T>& products, int64_t row, int64_t column, int64_t offset, int64_t count,
                               bool is_first) {
  const T* const rows = products.rows + row * products.row_pitch + offset;
  const T* const* const columns = products.columns + column;
  const int64_t there = std::min<int64_t>(kColumns, products.column_count - column);
  T* const sums = products.sums + row * products.sums_pitch + column;
  const auto add = [&](auto tile_rows) HWY_ATTR {
    AddTile<decltype(tile_rows)::value>(rows, products.row_pitch, columns, offset, count, is_first, there, sums,
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

// The products of all rows with all columns over places [0, count), a part of them after the other, so that what tiles
// share is in the cache. With is_first the sums are set, and else added to.
template <class T>
void AddProducts(const Products<T>& products, int64_t count, int64_t part, bool is_first) {
  for (int64_t offset = 0; offset < count; offset += part) {
    const int64_t places = std::min(part, count - offset);
    const bool sets = is_first && offset == 0;
    if (products.columns_first) {
      for (int64_t column = 0; column < products.column_count; column += kColumns) {
        for (int64_t row = 0; row < products.row_count; row += kRows) {
          AddTileAt(products, row, column, offset, places, sets);
        }
      }
    } else {
      for (int64_t row = 0; row < products.row_count; row += kRows) {
        for (int64_t column = 0; column < products.column_count; column += kColumns) {
          AddTileAt(products, row, column, offset, places, sets);
        }
      }
    }
  }
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
template <int kChannels, bool kByChannel, int kVectors, class T>
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
  for (int64_t m = 0; m < filters.plane_count; ++m, plane += filters.plane_pitch) {
    for (int64_t tap = 0; tap < filters.tap_count; ++tap, weight += kByChannel ? 1 : kChannelsAtOnce) {
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
        for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::MulAdd(factor, value[v], sum[c][v]);
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
template <int kChannels, bool kByChannel, class T>
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
      case 1: AddFiltersAt<kChannels, kByChannel, 1>(filters, first, place); break;
      case 2: AddFiltersAt<kChannels, kByChannel, 2>(filters, first, place); break;
      case 3: AddFiltersAt<kChannels, kByChannel, 3>(filters, first, place); break;
      default:
        if constexpr (kChannels == 1) {
          taken == 4 ? AddFiltersAt<kChannels, kByChannel, 4>(filters, first, place)
                     : AddFiltersAt<kChannels, kByChannel, 8>(filters, first, place);
        }
    }
    left -= taken;
    place += taken * lanes;
  }
}

// The same for eight channels, or one.
template <class T>
void AddFilters(const Filters<T>& filters, bool is_single) {
  if (is_single) {
    AddFiltersOf<1, true>(filters, 0);
    return;
  }
  for (int64_t first = 0; first < kChannelsAtOnce; first += kTileChannels) {
    if (filters.weight_pitch == 0) {
      AddFiltersOf<kTileChannels, false>(filters, first);
    } else {
      AddFiltersOf<kTileChannels, true>(filters, first);
    }
  }
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

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

using Geometry = ConvolutionGeometry;

// How the large side is packed along a dimension, so that one place of the kernel meets elements that are neighbours: a
// row for each remainder of positions by the stride, with the zeros of the padding that windows meet. Rows lie one
// after the other. Where one ends in zeros and the next begins with some, they share them.
struct PackedAxis {
  struct Row {
    int64_t remainder;
    int64_t windows;  // positions that are met
    int64_t begin;    // of the elements that are there
    int64_t end;
  };

  PackedAxis(const Geometry& g, int axis) : pitch(g.small[axis]) {
    const int64_t stride = g.stride[axis];
    for (int64_t tap = 0; tap < g.kernel[axis]; ++tap) {
      const int64_t reach = tap * g.dilation[axis];
      size_t found = 0;
      while (found < rows.size() && rows[found].remainder != reach % stride) ++found;
      if (found == rows.size()) rows.push_back({reach % stride, 0, 0, 0});
      rows[found].windows = std::max(rows[found].windows, g.small[axis] + reach / stride);
      row_of_tap.push_back(static_cast<int64_t>(found));
      shift_of_tap.push_back(reach / stride);
    }
    for (Row& row : rows) {
      const int64_t first = g.padding[axis] - row.remainder;  // of the elements, in positions before the stride
      row.begin = first <= 0 ? 0 : CeilDiv(first, stride);
      const int64_t last = g.large[axis] + first;
      row.end = last <= 0 ? 0 : std::min(row.windows, CeilDiv(last, stride));
      if (row.begin >= row.end) {
        row.begin = row.windows;
        row.end = 0;
      }
      pitch = std::max({pitch, row.end, row.windows - row.begin});
    }
  }

  std::vector<Row> rows;
  std::vector<int64_t> row_of_tap;
  std::vector<int64_t> shift_of_tap;
  int64_t pitch;
};

// The same of all dimensions: planes, one for each row of each dimension with each of the others.
class PackedPlanes {
 public:
  explicit PackedPlanes(const Geometry& g)
      : g_(g),
        depth_(g, 0),
        height_(g, 1),
        width_(g, 2),
        size_(depth_.pitch * height_.pitch * width_.pitch),
        count_(static_cast<int64_t>(depth_.rows.size() * height_.rows.size() * width_.rows.size())) {
    for (int64_t tap0 = 0; tap0 < g.kernel[0]; ++tap0) {
      for (int64_t tap1 = 0; tap1 < g.kernel[1]; ++tap1) {
        for (int64_t tap2 = 0; tap2 < g.kernel[2]; ++tap2) {
          plane_of_tap_.push_back(
              (depth_.row_of_tap[tap0] * static_cast<int64_t>(height_.rows.size()) + height_.row_of_tap[tap1]) *
                  static_cast<int64_t>(width_.rows.size()) +
              width_.row_of_tap[tap2]);
          shift_of_tap_.push_back((depth_.shift_of_tap[tap0] * height_.pitch + height_.shift_of_tap[tap1]) *
                                      width_.pitch +
                                  width_.shift_of_tap[tap2]);
        }
      }
    }
    largest_shift_ = *std::max_element(shift_of_tap_.begin(), shift_of_tap_.end());
  }

  int64_t size() const { return size_; }          // of a plane
  int64_t count() const { return count_; }        // of planes
  int64_t pitch() const { return width_.pitch; }  // of rows
  int64_t plane_pitch() const { return height_.pitch * width_.pitch; }
  int64_t largest_shift() const { return largest_shift_; }
  int64_t plane_of_tap(int64_t tap) const { return plane_of_tap_[tap]; }
  int64_t shift_of_tap(int64_t tap) const { return shift_of_tap_[tap]; }
  // Whether every element of the large side is in a plane.
  bool has_all() const {
    const PackedAxis* const axes[] = {&depth_, &height_, &width_};
    for (int axis = 0; axis < Geometry::kSpatial; ++axis) {
      int64_t elements = 0;
      for (const auto& row : axes[axis]->rows) elements += std::max<int64_t>(0, row.end - row.begin);
      if (elements != g_.large[axis]) return false;
    }
    return true;
  }
  // Whether a plane is the large side as it is.
  bool is_plain() const { return count_ == 1 && size_ == g_.large_size && size_ == g_.small_size; }

  // Packs a channel of an item to planes that are `distance` apart. What is not written was 0 before.
  template <class T, class Pack>
  T PackLarge(const Pack& pack, const T* from, T* to, int64_t distance) const {
    T check = 0;
    for (const auto& depth : depth_.rows) {
      for (const auto& height : height_.rows) {
        for (const auto& width : width_.rows) {
          for (int64_t z = depth.begin; z < depth.end && width.begin < width.end && height.begin < height.end; ++z) {
            const int64_t plane = ElementOf(0, z, depth.remainder);
            const int64_t row = plane * g_.large[1] + ElementOf(1, height.begin, height.remainder);
            const int64_t first = row * g_.large[2] + ElementOf(2, width.begin, width.remainder);
            check += pack(from + first, g_.stride[1] * g_.large[2], g_.stride[2], height.end - height.begin,
                          width.end - width.begin, to + (z * height_.pitch + height.begin) * width_.pitch + width.begin,
                          width_.pitch);
          }
          to += distance;
        }
      }
    }
    return check;
  }

  // Writes the elements of plane `index` to where they are in a channel.
  template <class T>
  void UnpackLarge(int64_t index, const T* from, T* to) const {
    const auto& width = width_.rows[static_cast<size_t>(index) % width_.rows.size()];
    const auto& height = height_.rows[static_cast<size_t>(index) / width_.rows.size() % height_.rows.size()];
    const auto& depth = depth_.rows[static_cast<size_t>(index) / width_.rows.size() / height_.rows.size()];
    const int64_t step = g_.stride[2];
    for (int64_t z = depth.begin; z < depth.end; ++z) {
      for (int64_t y = height.begin; y < height.end; ++y) {
        const int64_t row = ElementOf(0, z, depth.remainder) * g_.large[1] + ElementOf(1, y, height.remainder);
        T* const into = to + row * g_.large[2] + ElementOf(2, width.begin, width.remainder);
        const T* const row_from = from + (z * height_.pitch + y) * width_.pitch + width.begin;
        if (step == 1) {
          std::copy_n(row_from, std::max<int64_t>(0, width.end - width.begin), into);
        } else {
          for (int64_t i = 0; i < width.end - width.begin; ++i) into[i * step] = row_from[i];
        }
      }
    }
  }

  // Writes the windows of packed sums to a channel of the small side. Returns whether all are finite.
  template <class T, class Write>
  bool UnpackSmall(const Write& write, const T* from, const Finish<T>& finish, T* to) const {
    bool is_finite = true;
    for (int64_t z = 0; z < g_.small[0]; ++z) {
      is_finite &= write(from + z * plane_pitch(), pitch(), g_.small[1], g_.small[2], finish,
                         to + z * g_.small[1] * g_.small[2]);
    }
    return is_finite;
  }

  // Where windows [begin, end) of items lie, whose planes are `item_pitch` apart.
  std::vector<Piece> PiecesOfSmall(int64_t begin, int64_t end, int64_t item_pitch) const {
    std::vector<Piece> pieces;
    for (int64_t place = begin; place < end;) {
      const int64_t x = place % g_.small[2];
      const int64_t y = place / g_.small[2] % g_.small[1];
      const int64_t z = place / g_.small[2] / g_.small[1] % g_.small[0];
      const int64_t count = std::min(g_.small[2] - x, end - place);
      pieces.push_back(
          {place / g_.small_size * item_pitch + z * plane_pitch() + y * pitch() + x, place - begin, count});
      place += count;
    }
    return pieces;
  }

  // The same for the small side, which has one plane.
  template <class T, class Pack>
  T PackSmall(const Pack& pack, const T* from, T* to) const {
    T check = 0;
    for (int64_t z = 0; z < g_.small[0]; ++z) {
      check += pack(from + z * g_.small[1] * g_.small[2], g_.small[2], 1, g_.small[1], g_.small[2],
                    to + z * height_.pitch * width_.pitch, width_.pitch);
    }
    return check;
  }

 private:
  int64_t ElementOf(int axis, int64_t position, int64_t remainder) const {
    return position * g_.stride[axis] + remainder - g_.padding[axis];
  }

  const Geometry& g_;
  PackedAxis depth_;
  PackedAxis height_;
  PackedAxis width_;
  int64_t size_;
  int64_t count_;
  std::vector<int64_t> plane_of_tap_;
  std::vector<int64_t> shift_of_tap_;
  int64_t largest_shift_;
};

constexpr int64_t kLongestVector = 16;

// An odd number of cache lines, so that rows of this length do not meet in few places of the cache.
int64_t OddLines(int64_t elements) { return (CeilDiv(elements, kLongestVector) | 1) * kLongestVector; }

constexpr std::align_val_t kCacheLine{64};

struct FreeAligned {
  void operator()(void* memory) const { ::operator delete(memory, kCacheLine); }
};

constexpr int64_t kMostKept = 4 << 20;

// Zeros for a task, which must not throw: null where there is no memory. Threads keep up to three pieces for their
// next tasks, as the first use of new memory costs as much as the work on it.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    for (Piece& piece : Kept()) {
      if (memory_.memory == nullptr && piece.bytes >= bytes) std::swap(memory_, piece);
    }
    if (memory_.memory == nullptr) {
      memory_.memory.reset(::operator new(bytes, kCacheLine, std::nothrow));
      memory_.bytes = memory_.memory == nullptr ? 0 : bytes;
    }
    if (memory_.memory != nullptr) std::fill_n(data(), count, T{});
  }
  ~Scratch() {
    if (memory_.bytes > static_cast<size_t>(kMostKept)) return;
    for (Piece& piece : Kept()) {
      if (piece.bytes < memory_.bytes) std::swap(memory_, piece);
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() const { return static_cast<T*>(memory_.memory.get()); }

 private:
  struct Piece {
    std::unique_ptr<void, FreeAligned> memory;
    size_t bytes = 0;
  };
  static std::array<Piece, 3>& Kept() {
    static thread_local std::array<Piece, 3> pieces;
    return pieces;
  }

  Piece memory_;
};

// What tasks found on the way.
struct Findings {
  std::atomic<bool> not_finite{false};
  std::atomic<bool> no_memory{false};
};

// The weight gradient as products of matrices, of the small side by (channel of the large side, place of the kernel),
// over all places of all items: each column is a packed plane from a place on. Products with the zeros between rows
// and in the padding are 0 if all numbers are finite; returns false where one is not.
template <class T>
bool ProductsOfPlanes(const Geometry& g, const T* small, const T* large, T* out, const ParallelFor& parallel) {
  const PackedPlanes planes(g);
  const int64_t taps = g.kernel_size;
  const int64_t all_columns = g.large_channels * taps;
  const auto pack = GRADFUSE_DISPATCH(PackRows<T>);
  const auto add_products = GRADFUSE_DISPATCH(AddProducts<T>);

  // What a part of a block of rows and columns takes is to fit the second-level cache.
  constexpr int64_t kMostRows = 64;
  const int64_t most_channels = std::clamp<int64_t>(128 / planes.count(), 8, 64);
  constexpr int64_t kFewestPlaces = 1024;
  constexpr int64_t kTasks = 16;
  constexpr int64_t kPackedBytes = 2 << 20;
  const int64_t row_blocks = CeilDiv(g.small_channels, kMostRows);
  const int64_t column_blocks = CeilDiv(g.large_channels, most_channels);
  const int64_t rows_of_block = CeilDiv(g.small_channels, row_blocks);
  const int64_t channels_of_block = CeilDiv(g.large_channels, column_blocks);
  const int64_t blocks = g.groups * row_blocks * column_blocks;
  const int64_t most_slices = std::max<int64_t>(1, g.batch * planes.size() / kFewestPlaces);
  const int64_t wanted_slices = std::min({CeilDiv(kTasks, blocks), most_slices, g.batch});
  const int64_t items_of_slice = CeilDiv(g.batch, wanted_slices);
  const int64_t slices = CeilDiv(g.batch, items_of_slice);

  // Planes that need no packing are used where they are, if they are long enough.
  const bool in_place = planes.is_plain() && planes.size() >= 256;
  const int64_t item_bytes =
      (rows_of_block + channels_of_block * planes.count()) * planes.size() * static_cast<int64_t>(sizeof(T));
  const int64_t items_at_once =
      in_place ? 1 : std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(item_bytes, 1), 1, items_of_slice);
  // An odd number of cache lines, so that planes do not meet in few places of the cache.
  const int64_t needed = items_at_once * planes.size() + planes.largest_shift() + kLongestVector;
  const int64_t length = (CeilDiv(needed, kLongestVector) | 1) * kLongestVector;
  const int64_t part = taps == 1 ? 512 : 1024;

  const int64_t filters = g.groups * g.small_channels * all_columns;
  std::vector<T> sums(static_cast<size_t>(slices > 1 ? slices * filters : 0));
  Findings findings;
  const int64_t cost = g.batch * g.small_size * filters;
  parallel(blocks * slices, cost, [&](int64_t task) {
    const int64_t slice = task % slices;
    const int64_t block = task / slices;
    const int64_t group = block / (row_blocks * column_blocks);
    const int64_t first_row = block / column_blocks % row_blocks * rows_of_block;
    const int64_t first_channel = block % column_blocks * channels_of_block;
    const int64_t rows = std::min(rows_of_block, g.small_channels - first_row);
    const int64_t channels = std::min(channels_of_block, g.large_channels - first_channel);
    if (rows <= 0 || channels <= 0) return;
    const Scratch<T> packed_rows(in_place ? 0 : rows * length);
    const Scratch<T> packed_channels(in_place ? 0 : channels * planes.count() * length);
    const std::unique_ptr<const T*[]> columns(new (std::nothrow) const T*[channels * taps + kLongestVector]);
    if (packed_rows.data() == nullptr || packed_channels.data() == nullptr || columns == nullptr) {
      findings.no_memory = true;
      return;
    }
    T* const slice_sums = slices > 1 ? sums.data() + slice * filters : out;
    Products<T> products{};
    products.row_count = rows;
    products.columns = columns.get();
    products.column_count = channels * taps;
    products.columns_first = taps == 1;
    products.sums = slice_sums + (group * g.small_channels + first_row) * all_columns + first_channel * taps;
    products.sums_pitch = all_columns;
    products.rows = packed_rows.data();
    products.row_pitch = length;
    const auto set_columns = [&](const T* first, int64_t distance) {
      for (int64_t column = 0; column < channels * taps + kLongestVector; ++column) {
        const int64_t real = std::min(column, channels * taps - 1);
        columns[column] = first + (real / taps * planes.count() + planes.plane_of_tap(real % taps)) * distance +
                          planes.shift_of_tap(real % taps);
      }
    };
    set_columns(packed_channels.data(), length);
    T check = 0;
    const int64_t begin = slice * items_of_slice;
    const int64_t end = std::min(g.batch, begin + items_of_slice);
    for (int64_t first = begin; first < end; first += items_at_once) {
      const int64_t items = std::min(items_at_once, end - first);
      for (int64_t item = 0; item < items; ++item) {
        const int64_t n = first + item;
        const T* const s = small + ((n * g.groups + group) * g.small_channels + first_row) * g.small_size;
        const T* const l = large + ((n * g.groups + group) * g.large_channels + first_channel) * g.large_size;
        if (in_place) {
          products.rows = s;
          products.row_pitch = g.small_size;
          set_columns(l, g.large_size);
          continue;
        }
        for (int64_t row = 0; row < rows; ++row) {
          check +=
              planes.PackSmall(pack, s + row * g.small_size, packed_rows.data() + row * length + item * planes.size());
        }
        for (int64_t channel = 0; channel < channels; ++channel) {
          check += planes.PackLarge(pack, l + channel * g.large_size,
                                    packed_channels.data() + channel * planes.count() * length + item * planes.size(),
                                    length);
        }
      }
      add_products(products, items * planes.size(), part, first == begin);
    }
    if (!(check == 0)) findings.not_finite = true;
  });
  if (findings.no_memory) throw std::bad_alloc();
  if (findings.not_finite) return false;
  if (slices > 1) {
    constexpr int64_t kTask = 4096;
    parallel(CeilDiv(filters, kTask), (slices + 1) * filters * static_cast<int64_t>(sizeof(T)), [&](int64_t task) {
      const int64_t begin = task * kTask;
      const int64_t end = std::min(filters, begin + kTask);
      std::copy(sums.data() + begin, sums.data() + end, out + begin);
      for (int64_t slice = 1; slice < slices; ++slice) {
        const T* const from = sums.data() + slice * filters;
        for (int64_t i = begin; i < end; ++i) out[i] += from[i];
      }
    });
  }
  return true;
}

// The same where each group has one channel on both sides: of each channel the large side is packed, and rows of the
// small side are used where they are.
template <class T>
bool ProductsOfChannels(const Geometry& g, const T* small, const T* large, T* out, const ParallelFor& parallel) {
  const PackedPlanes planes(g);
  const int64_t taps = g.kernel_size;
  const auto pack = GRADFUSE_DISPATCH(PackRows<T>);
  const auto add_taps = GRADFUSE_DISPATCH(AddTaps<T>);
  const int64_t length = planes.size() + planes.largest_shift() + kLongestVector;
  // Channels of one item lie one after the other: a task reads some of them in one sweep.
  constexpr int64_t kSweepBytes = 32 << 10;
  constexpr int64_t kTasks = 16;
  const int64_t plane_bytes = g.large_size * static_cast<int64_t>(sizeof(T));
  const int64_t channels_of_task =
      std::max<int64_t>(1, std::min(CeilDiv(kSweepBytes, plane_bytes), CeilDiv(g.groups, kTasks)));
  Findings findings;
  parallel(CeilDiv(g.groups, channels_of_task), g.batch * g.groups * g.small_size * taps, [&](int64_t task) {
    const int64_t first = task * channels_of_task;
    const int64_t end = std::min(g.groups, first + channels_of_task);
    const Scratch<T> packed(planes.count() * length);
    if (packed.data() == nullptr) {
      findings.no_memory = true;
      return;
    }
    std::fill_n(out + first * taps, (end - first) * taps, T{});
    T check = 0;
    for (int64_t n = 0; n < g.batch; ++n) {
      for (int64_t channel = first; channel < end; ++channel) {
        const T* const rows = small + (n * g.groups + channel) * g.small_size;
        check += planes.PackLarge(pack, large + (n * g.groups + channel) * g.large_size, packed.data(), length);
        for (int64_t tap = 0; tap < taps; tap += kTapsAtOnce) {
          const int64_t count = std::min(kTapsAtOnce, taps - tap);
          for (int64_t z = 0; z < g.small[0]; ++z) {
            const T* at[kTapsAtOnce];
            for (int64_t one = 0; one < count; ++one) {
              at[one] = packed.data() + planes.plane_of_tap(tap + one) * length + planes.shift_of_tap(tap + one) +
                        z * planes.plane_pitch();
            }
            check += add_taps(rows + z * g.small[1] * g.small[2], g.small[1], g.small[2], at, planes.pitch(), count,
                              out + channel * taps + tap);
          }
        }
      }
    }
    if (!(check == 0)) findings.not_finite = true;
  });
  if (findings.no_memory) throw std::bad_alloc();
  return !findings.not_finite;
}

// The gradient of the large side, plane by plane as it is packed: an element is the sum of weights times the packed
// small side, shifted. Sums between rows mean nothing and are left out. Weights meet zeros of the padding, so that all
// must be finite; returns false where one is not.
template <class T>
bool SumsOfPlanes(const Geometry& g, const T* small, const T* weight, T* out, const ParallelFor& parallel) {
  const PackedPlanes planes(g);
  const int64_t taps = g.kernel_size;
  const auto pack = GRADFUSE_DISPATCH(PackRows<T>);
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const auto pack_filters = GRADFUSE_DISPATCH(PackFilters<T>);
  const bool is_single = g.large_channels == 1;
  const int64_t at_once = is_single ? 1 : kChannelsAtOnce;
  const int64_t tiles = CeilDiv(g.large_channels, at_once);

  // What a plane needs of the weights, for a whole tile and for the last.
  std::vector<int64_t> order;
  std::vector<int64_t> order_of_last;
  std::vector<int64_t> plane_ends;
  std::vector<std::vector<int64_t>> shifts_of_plane;
  const int64_t channels_of_last = g.large_channels - (tiles - 1) * at_once;
  for (int64_t plane = 0; plane < planes.count(); ++plane) {
    shifts_of_plane.emplace_back();
    for (int64_t tap = 0; tap < taps; ++tap) {
      if (planes.plane_of_tap(tap) != plane) continue;
      shifts_of_plane.back().push_back(planes.shift_of_tap(tap));
      for (int64_t channel = 0; channel < at_once; ++channel) {
        order.push_back(channel * taps + tap);
        order_of_last.push_back(channel < channels_of_last ? channel * taps + tap : -1);
      }
    }
    plane_ends.push_back(static_cast<int64_t>(order.size()));
  }

  // As many items at once as fill some tiles of places, and fit the second-level cache.
  constexpr int64_t kPackedBytes = 512 << 10;
  constexpr int64_t kFewestPlaces = 256;
  constexpr int64_t kTasks = 16;
  const int64_t item_bytes = g.small_channels * planes.size() * static_cast<int64_t>(sizeof(T));
  const int64_t most_items = std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(item_bytes, 1), 1, g.batch);
  const int64_t wanted_items = std::max(CeilDiv(g.batch, kTasks), CeilDiv(kFewestPlaces, planes.size()));
  const int64_t blocks = CeilDiv(g.batch, std::min(most_items, wanted_items));
  const int64_t items_at_once = CeilDiv(g.batch, blocks);
  // Each task packs for itself: it is to have enough to do with that.
  constexpr int64_t kFewestTiles = 16;
  const int64_t wanted_parts = std::min(CeilDiv(kTasks, blocks * g.groups), tiles / kFewestTiles);
  const int64_t tiles_of_task = CeilDiv(tiles, std::max<int64_t>(1, wanted_parts));
  const int64_t parts = CeilDiv(tiles, tiles_of_task);
  const int64_t places = items_at_once * planes.size();
  const int64_t front = CeilDiv(planes.largest_shift(), kLongestVector) * kLongestVector;
  const int64_t length = (CeilDiv(front + places + kMostPlacesOfTile, kLongestVector) | 1) * kLongestVector;
  const bool has_all = planes.has_all();
  Findings findings;
  const int64_t cost = g.batch * g.small_size * g.groups * g.small_channels * g.large_channels * taps;
  parallel(blocks * g.groups * parts, cost, [&](int64_t task) {
    const int64_t part = task % parts;
    const int64_t group = task / parts % g.groups;
    const int64_t first = task / parts / g.groups * items_at_once;
    const int64_t items = std::min(items_at_once, g.batch - first);
    if (items <= 0) return;
    const Scratch<T> packed(g.small_channels * length);
    const Scratch<T> sums(at_once * length);
    const Scratch<T> weights(g.small_channels * taps * at_once);
    if (packed.data() == nullptr || sums.data() == nullptr || weights.data() == nullptr) {
      findings.no_memory = true;
      return;
    }
    for (int64_t m = 0; m < g.small_channels; ++m) {
      for (int64_t item = 0; item < items; ++item) {
        const int64_t channel = ((first + item) * g.groups + group) * g.small_channels + m;
        planes.PackSmall(pack, small + channel * g.small_size,
                         packed.data() + m * length + front + item * planes.size());
      }
    }
    Filters<T> filters{};
    filters.planes = packed.data() + front;
    filters.plane_pitch = length;
    filters.plane_count = g.small_channels;
    filters.place_count = items * planes.size();
    filters.sums = sums.data();
    filters.sums_pitch = length;
    T check = 0;
    for (int64_t tile = part * tiles_of_task; tile < std::min(tiles, (part + 1) * tiles_of_task); ++tile) {
      const int64_t begin = tile * at_once;
      const int64_t end = std::min(g.large_channels, begin + at_once);
      const auto channel_at = [&](int64_t item, int64_t channel) {
        return out + (((first + item) * g.groups + group) * g.large_channels + channel) * g.large_size;
      };
      if (!has_all) {
        for (int64_t item = 0; item < items; ++item) {
          std::fill_n(channel_at(item, begin), (end - begin) * g.large_size, T{});
        }
      }
      FilterTile<T> own{};
      own.weights = weight + (group * g.small_channels * g.large_channels + begin) * taps;
      own.pitch = g.large_channels * taps;
      own.small_channels = g.small_channels;
      own.count = (end - begin) * taps;
      own.order = end - begin < at_once ? order_of_last.data() : order.data();
      own.plane_ends = plane_ends.data();
      own.plane_count = planes.count();
      own.packed = weights.data();
      check += pack_filters(own);
      filters.weights = weights.data();
      for (int64_t plane = 0; plane < planes.count(); ++plane) {
        const std::vector<int64_t>& shifts = shifts_of_plane[static_cast<size_t>(plane)];
        filters.shifts = shifts.data();
        filters.tap_count = static_cast<int64_t>(shifts.size());
        add_filters(filters, is_single);
        filters.weights += g.small_channels * filters.tap_count * at_once;
        for (int64_t channel = begin; channel < end; ++channel) {
          for (int64_t item = 0; item < items; ++item) {
            planes.UnpackLarge(plane, sums.data() + (channel - begin) * length + item * planes.size(),
                               channel_at(item, channel));
          }
        }
      }
    }
    if (!(check == 0)) findings.not_finite = true;
  });
  if (findings.no_memory) throw std::bad_alloc();
  return !findings.not_finite;
}

// Where planes are small, the zeros between their rows are a large share of them. There the gradients are products of
// matrices over the windows alone.

// Windows side by side that meet neighbours of the large side with a place of the kernel.
struct Run {
  int64_t small;
  int64_t large;
  int64_t count;
};

std::vector<std::vector<Run>> RunsOfTaps(const Geometry& g) {
  std::vector<std::vector<Run>> runs;
  direct::ForEachTap(g, [&](int64_t, int64_t tap0, int64_t tap1, int64_t tap2) {
    runs.emplace_back();
    direct::ForEachRow(g, tap0, tap1, tap2, [&](int64_t small, int64_t large, int64_t count) {
      runs.back().push_back({small, large, count});
    });
  });
  return runs;
}

constexpr int64_t kProductBytes = 512 << 10;  // what a task packs is to fit the second-level cache

// The gradient of the large side: for each (channel, place of the kernel) a sum over channels of the small side, which
// is then added to where the windows meet the large side.
template <class T>
void SumsOfWindows(const Geometry& g, const T* small, const T* weight, T* out, const ParallelFor& parallel) {
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const std::vector<std::vector<Run>> runs = RunsOfTaps(g);
  const int64_t taps = g.kernel_size;
  const int64_t windows_bytes = g.small_channels * g.small_size * static_cast<int64_t>(sizeof(T));
  // A tile's sums are to fit the first-level cache.
  constexpr int64_t kMostPlaces = 512;
  const int64_t most_items = std::min(kProductBytes / windows_bytes, CeilDiv(kMostPlaces, g.small_size));
  const int64_t blocks = CeilDiv(g.batch, std::clamp<int64_t>(most_items, 1, g.batch));
  const int64_t items_of_block = CeilDiv(g.batch, blocks);
  const int64_t length = OddLines(CeilDiv(items_of_block * g.small_size, kMostPlacesOfTile) * kMostPlacesOfTile);

  // By block of items, group and channel: the windows of all items of the block.
  constexpr int64_t kChannelsOfTask = 16;
  const int64_t channels = g.groups * g.small_channels;
  const Scratch<T> windows(blocks * channels * length);
  if (windows.data() == nullptr) throw std::bad_alloc();
  parallel(CeilDiv(channels, kChannelsOfTask), 2 * g.batch * g.groups * windows_bytes, [&](int64_t task) {
    const int64_t end = std::min(channels, (task + 1) * kChannelsOfTask);
    for (int64_t n = 0; n < g.batch; ++n) {
      for (int64_t channel = task * kChannelsOfTask; channel < end; ++channel) {
        std::copy_n(
            small + (n * channels + channel) * g.small_size, g.small_size,
            windows.data() + (n / items_of_block * channels + channel) * length + n % items_of_block * g.small_size);
      }
    }
  });

  constexpr int64_t kTasks = 16;
  const int64_t channel_bytes = g.small_channels * taps * static_cast<int64_t>(sizeof(T));
  const int64_t most_channels = std::max<int64_t>(1, kProductBytes / 2 / channel_bytes);
  const int64_t channels_of_task =
      std::min(most_channels, CeilDiv(g.large_channels, CeilDiv(kTasks, blocks * g.groups)));
  const int64_t parts = CeilDiv(g.large_channels, channels_of_task);
  const int64_t tile_size = OddLines(g.small_channels * kChannelsAtOnce);
  const int64_t no_shift = 0;
  std::atomic<bool> no_memory{false};
  parallel(blocks * g.groups * parts, g.batch * g.small_size * channels * g.large_channels * taps, [&](int64_t task) {
    const int64_t first_channel = task % parts * channels_of_task;
    const int64_t group = task / parts % g.groups;
    const int64_t block = task / parts / g.groups;
    const int64_t items = std::min(items_of_block, g.batch - block * items_of_block);
    const int64_t rows = std::min(channels_of_task, g.large_channels - first_channel) * taps;
    const int64_t tiles = CeilDiv(rows, kChannelsAtOnce);
    if (items <= 0) return;
    const Scratch<T> weights(tiles * tile_size);
    const Scratch<T> sums(kChannelsAtOnce * length);
    if (weights.data() == nullptr || sums.data() == nullptr) {
      no_memory = true;
      return;
    }
    for (int64_t m = 0; m < g.small_channels; ++m) {
      const T* const from = weight + ((group * g.small_channels + m) * g.large_channels + first_channel) * taps;
      // Rows lie in pages of their own, which the processor does not look ahead to.
      constexpr int64_t kAhead = 8;
      for (int64_t row = 0; row < rows && m + kAhead < g.small_channels; row += kLongestVector) {
        __builtin_prefetch(from + kAhead * g.large_channels * taps + row);
      }
      T* to = weights.data() + m * kChannelsAtOnce;
      int64_t row = 0;
      for (; row + kChannelsAtOnce <= rows; row += kChannelsAtOnce, to += tile_size) {
        std::copy_n(from + row, kChannelsAtOnce, to);
      }
      std::copy(from + row, from + rows, to);
    }
    const auto channel_at = [&](int64_t item, int64_t channel) {
      const int64_t n = block * items_of_block + item;
      return out + ((n * g.groups + group) * g.large_channels + first_channel + channel) * g.large_size;
    };
    for (int64_t item = 0; item < items; ++item) std::fill_n(channel_at(item, 0), rows / taps * g.large_size, T{});
    Filters<T> filters{};
    filters.planes = windows.data() + (block * g.groups + group) * g.small_channels * length;
    filters.plane_pitch = length;
    filters.plane_count = g.small_channels;
    filters.shifts = &no_shift;
    filters.tap_count = 1;
    filters.place_count = items * g.small_size;
    filters.sums = sums.data();
    filters.sums_pitch = length;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      filters.weights = weights.data() + tile * tile_size;
      add_filters(filters, /*is_single=*/false);
      const int64_t first = tile * kChannelsAtOnce;
      for (int64_t row = first; row < std::min(rows, first + kChannelsAtOnce); ++row) {
        for (int64_t item = 0; item < items; ++item) {
          const T* const from = sums.data() + (row - first) * length + item * g.small_size;
          T* const to = channel_at(item, row / taps);
          for (const Run& run : runs[static_cast<size_t>(row % taps)]) {
            for (int64_t i = 0; i < run.count; ++i) to[run.large + i * g.stride[2]] += from[run.small + i];
          }
        }
      }
    }
  });
  if (no_memory) throw std::bad_alloc();
}

// A channel of the large side with the padding that windows meet, and without what none meets.
class PaddedPlane {
 public:
  explicit PaddedPlane(const Geometry& g) : g_(g) {
    for (int axis = 0; axis < Geometry::kSpatial; ++axis) {
      extent_[axis] = (g.small[axis] - 1) * g.stride[axis] + (g.kernel[axis] - 1) * g.dilation[axis] + 1;
      begin_[axis] = std::min(g.padding[axis], extent_[axis]);
      end_[axis] = std::clamp(g.large[axis] + g.padding[axis], begin_[axis], extent_[axis]);
    }
    direct::ForEachTap(g, [&](int64_t, int64_t tap0, int64_t tap1, int64_t tap2) {
      shifts_.push_back(At(tap0 * g.dilation[0], tap1 * g.dilation[1], tap2 * g.dilation[2]));
    });
  }

  int64_t size() const { return extent_[0] * extent_[1] * extent_[2]; }
  const std::vector<int64_t>& shifts() const { return shifts_; }  // of the places of the kernel
  int64_t At(int64_t z, int64_t y, int64_t x) const { return (z * extent_[1] + y) * extent_[2] + x; }

  template <class T>
  void Copy(const T* from, T* to) const {
    for (int64_t z = begin_[0]; z < end_[0]; ++z) {
      for (int64_t y = begin_[1]; y < end_[1]; ++y) {
        const int64_t row = (z - g_.padding[0]) * g_.large[1] + y - g_.padding[1];
        std::copy_n(from + row * g_.large[2] + begin_[2] - g_.padding[2], end_[2] - begin_[2],
                    to + At(z, y, begin_[2]));
      }
    }
  }

 private:
  const Geometry& g_;
  std::array<int64_t, Geometry::kSpatial> extent_{};
  std::array<int64_t, Geometry::kSpatial> begin_{};
  std::array<int64_t, Geometry::kSpatial> end_{};
  std::vector<int64_t> shifts_;
};

// The weight gradient: the small side by windows, times windows by (channel of the large side, place of the kernel).
// Returns false if the small side, which meets the padding, is not finite.
template <class T>
bool ProductsOfWindows(const Geometry& g, const T* small, const T* large, T* out, const ParallelFor& parallel) {
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const PaddedPlane plane(g);
  const int64_t taps = g.kernel_size;
  const int64_t windows = g.batch * g.small_size;
  const int64_t tiles = CeilDiv(g.small_channels, kChannelsAtOnce);
  std::vector<T> factors(static_cast<size_t>(g.groups * tiles * windows * kChannelsAtOnce));
  Findings findings;
  parallel(g.groups * tiles, 2 * g.groups * g.small_channels * windows * static_cast<int64_t>(sizeof(T)),
           [&](int64_t task) {
             const int64_t group = task / tiles;
             const int64_t first = task % tiles * kChannelsAtOnce;
             const int64_t channels = std::min(kChannelsAtOnce, g.small_channels - first);
             T* to = factors.data() + task * windows * kChannelsAtOnce;
             T check = 0;
             for (int64_t n = 0; n < g.batch; ++n) {
               const T* const from = small + ((n * g.groups + group) * g.small_channels + first) * g.small_size;
               for (int64_t i = 0; i < g.small_size; ++i, to += kChannelsAtOnce) {
                 for (int64_t m = 0; m < channels; ++m) {
                   to[m] = from[m * g.small_size + i];
                   check += to[m] * 0;
                 }
               }
             }
             if (!(check == 0)) findings.not_finite = true;
           });
  if (findings.not_finite) return false;

  // As many channels as fill whole tiles.
  const int64_t tile_bytes = windows * kMostPlacesOfTile * static_cast<int64_t>(sizeof(T));
  const int64_t tiles_at_once = std::clamp<int64_t>(kProductBytes / tile_bytes, 1, 4);
  const int64_t channels_of_task = std::clamp<int64_t>(tiles_at_once * kMostPlacesOfTile / taps, 1, g.large_channels);
  const int64_t parts = CeilDiv(g.large_channels, channels_of_task);
  const int64_t pitch = OddLines(CeilDiv(channels_of_task * taps, kMostPlacesOfTile) * kMostPlacesOfTile);
  const int64_t no_shift = 0;
  parallel(g.groups * parts, windows * g.groups * g.small_channels * g.large_channels * taps, [&](int64_t task) {
    const int64_t group = task / parts;
    const int64_t first_channel = task % parts * channels_of_task;
    const int64_t channels = std::min(channels_of_task, g.large_channels - first_channel);
    const Scratch<T> packed(windows * pitch);
    const Scratch<T> padded(channels * plane.size());
    const Scratch<T> sums(kChannelsAtOnce * pitch);
    if (packed.data() == nullptr || padded.data() == nullptr || sums.data() == nullptr) {
      findings.no_memory = true;
      return;
    }
    T* to = packed.data();
    for (int64_t n = 0; n < g.batch; ++n) {
      const T* const from = large + ((n * g.groups + group) * g.large_channels + first_channel) * g.large_size;
      for (int64_t channel = 0; channel < channels; ++channel) {
        plane.Copy(from + channel * g.large_size, padded.data() + channel * plane.size());
      }
      for (int64_t z = 0; z < g.small[0]; ++z) {
        for (int64_t y = 0; y < g.small[1]; ++y) {
          for (int64_t x = 0; x < g.small[2]; ++x, to += pitch) {
            const T* window = padded.data() + plane.At(z * g.stride[0], y * g.stride[1], x * g.stride[2]);
            T* into = to;
            for (int64_t channel = 0; channel < channels; ++channel, window += plane.size()) {
              for (const int64_t shift : plane.shifts()) *into++ = window[shift];
            }
          }
        }
      }
    }
    Filters<T> filters{};
    filters.planes = packed.data();
    filters.plane_pitch = pitch;
    filters.plane_count = windows;
    filters.shifts = &no_shift;
    filters.tap_count = 1;
    filters.place_count = channels * taps;
    filters.sums = sums.data();
    filters.sums_pitch = pitch;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      filters.weights = factors.data() + (group * tiles + tile) * windows * kChannelsAtOnce;
      add_filters(filters, /*is_single=*/false);
      const int64_t first = tile * kChannelsAtOnce;
      for (int64_t m = first; m < std::min(g.small_channels, first + kChannelsAtOnce); ++m) {
        std::copy_n(sums.data() + (m - first) * pitch, channels * taps,
                    out + ((group * g.small_channels + m) * g.large_channels + first_channel) * taps);
      }
    }
  });
  if (findings.no_memory) throw std::bad_alloc();
  return true;
}

// Measured: with enough channels to sum over, what is saved of zeros is worth the sums that are added to the large
// side.
bool PaysByWindows(const Geometry& g) {
  constexpr int64_t kFewestChannels = 64;
  if (g.small_channels < kFewestChannels) return false;
  return g.stride[2] > 1 || PackedPlanes(g).size() * 5 >= g.small_size * 6;
}

// The weights of a convolution by tile of channels of the small side: rows of (channel of the large side, place of the
// kernel) as they are, and of a tile that is not full a copy with rows of zeros.
template <class T>
class WeightTiles {
 public:
  WeightTiles(const Geometry& g, const T* weight)
      : weight_(weight),
        channels_(g.small_channels),
        rows_(g.large_channels * g.kernel_size),
        at_once_(channels_ == 1 ? 1 : kChannelsAtOnce) {
    const int64_t left = channels_ % at_once_;
    if (left == 0) return;
    last_.resize(static_cast<size_t>(g.groups * at_once_ * rows_));
    for (int64_t group = 0; group < g.groups; ++group) {
      std::copy_n(weight + ((group + 1) * channels_ - left) * rows_, left * rows_,
                  last_.data() + group * at_once_ * rows_);
    }
  }

  int64_t at_once() const { return at_once_; }
  int64_t count() const { return CeilDiv(channels_, at_once_); }
  int64_t rows() const { return rows_; }
  const T* Of(int64_t group, int64_t tile) const {
    if ((tile + 1) * at_once_ > channels_) return last_.data() + group * at_once_ * rows_;
    return weight_ + (group * channels_ + tile * at_once_) * rows_;
  }

 private:
  const T* weight_;
  int64_t channels_;
  int64_t rows_;
  int64_t at_once_;
  std::vector<T> last_;
};

template <class T>
struct Finishes {
  const T* bias;  // or null
  bool relu;

  Finish<T> Of(int64_t channel) const {
    return {bias == nullptr ? T{} : bias[channel], relu ? T{} : -std::numeric_limits<T>::infinity()};
  }
};

// A convolution of the large side: an element of the small one is the sum of weights times packed planes, shifted.
// Weights meet zeros of the padding: returns whether all results are finite, and else they may be wrong.
template <class T>
bool SumsOfLarge(const Geometry& g, const PackedPlanes& planes, const T* large, const T* weight,
                 const Finishes<T>& finishes, T* out, const ParallelFor& parallel) {
  const int64_t taps = g.kernel_size;
  const auto pack = GRADFUSE_DISPATCH(PackRows<T>);
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const auto write = GRADFUSE_DISPATCH(WriteRows<T>);
  const WeightTiles<T> tiles(g, weight);
  const int64_t item_bytes = g.large_channels * planes.count() * planes.size() * static_cast<int64_t>(sizeof(T));
  // As many items at once as fill some tiles of places, and fit the second-level cache.
  constexpr int64_t kFewestPlaces = 256;
  constexpr int64_t kTasks = 16;
  const int64_t most_items = std::clamp<int64_t>(kProductBytes / std::max<int64_t>(item_bytes, 1), 1, g.batch);
  const int64_t wanted_items = std::max(CeilDiv(g.batch, kTasks), CeilDiv(kFewestPlaces, planes.size()));
  const int64_t blocks = CeilDiv(g.batch, std::min(most_items, wanted_items));
  const int64_t items_at_once = CeilDiv(g.batch, blocks);
  const int64_t length = OddLines(items_at_once * planes.size() + planes.largest_shift() + kMostPlacesOfTile);
  // Each task packs for itself: it is to have enough to do with that.
  constexpr int64_t kFewestTiles = 16;
  const int64_t wanted_parts = std::min(CeilDiv(kTasks, blocks * g.groups), tiles.count() / kFewestTiles);
  const int64_t tiles_of_part = CeilDiv(tiles.count(), std::max<int64_t>(1, wanted_parts));
  const int64_t parts = CeilDiv(tiles.count(), tiles_of_part);
  std::vector<int64_t> shifts;
  for (int64_t tap = 0; tap < taps; ++tap) {
    shifts.push_back(-(planes.plane_of_tap(tap) * length + planes.shift_of_tap(tap)));
  }
  Findings findings;
  const int64_t cost = g.batch * g.small_size * g.groups * g.small_channels * tiles.rows();
  parallel(blocks * g.groups * parts, cost, [&](int64_t task) {
    const int64_t part = task % parts;
    const int64_t group = task / parts % g.groups;
    const int64_t first = task / parts / g.groups * items_at_once;
    const int64_t items = std::min(items_at_once, g.batch - first);
    if (items <= 0) return;
    const Scratch<T> packed(g.large_channels * planes.count() * length);
    const Scratch<T> sums(tiles.at_once() * length);
    if (packed.data() == nullptr || sums.data() == nullptr) {
      findings.no_memory = true;
      return;
    }
    for (int64_t channel = 0; channel < g.large_channels; ++channel) {
      T* const to = packed.data() + channel * planes.count() * length;
      for (int64_t item = 0; item < items; ++item) {
        const T* const from = large + (((first + item) * g.groups + group) * g.large_channels + channel) * g.large_size;
        planes.PackLarge(pack, from, to + item * planes.size(), length);
      }
    }
    Filters<T> filters{};
    filters.planes = packed.data();
    filters.plane_pitch = planes.count() * length;
    filters.plane_count = g.large_channels;
    filters.shifts = shifts.data();
    filters.tap_count = taps;
    filters.weight_pitch = tiles.rows();
    filters.place_count = items * planes.size();
    filters.sums = sums.data();
    filters.sums_pitch = length;
    bool is_finite = true;
    for (int64_t tile = part * tiles_of_part; tile < std::min(tiles.count(), (part + 1) * tiles_of_part); ++tile) {
      filters.weights = tiles.Of(group, tile);
      add_filters(filters, tiles.at_once() == 1);
      const int64_t begin = tile * tiles.at_once();
      for (int64_t one = begin; one < std::min(g.small_channels, begin + tiles.at_once()); ++one) {
        const int64_t channel = group * g.small_channels + one;
        for (int64_t item = 0; item < items; ++item) {
          T* const to = out + ((first + item) * g.groups * g.small_channels + channel) * g.small_size;
          is_finite &= planes.UnpackSmall(write, sums.data() + (one - begin) * length + item * planes.size(),
                                          finishes.Of(channel), to);
        }
      }
    }
    if (!is_finite) findings.not_finite = true;
  });
  if (findings.no_memory) throw std::bad_alloc();
  return !findings.not_finite;
}

// The same of windows that are copied side by side, in panels, so that no zeros between rows are multiplied.
template <class T>
bool SumsOfPanels(const Geometry& g, const PackedPlanes& planes, const T* large, const T* weight,
                  const Finishes<T>& finishes, T* out, const ParallelFor& parallel) {
  const int64_t taps = g.kernel_size;
  const auto pack = GRADFUSE_DISPATCH(PackRows<T>);
  const auto copy_panel = GRADFUSE_DISPATCH(CopyPanel<T>);
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const auto write = GRADFUSE_DISPATCH(WriteRows<T>);
  const WeightTiles<T> tiles(g, weight);
  const int64_t channels = g.groups * g.large_channels;
  // A plane ends in the zeros that the next one of the same remainders begins with.
  const int64_t plane_size = planes.size() + (planes.count() > 1 ? planes.largest_shift() : 0);
  const int64_t channel_size = planes.count() * plane_size;
  const int64_t item_size = channels * channel_size;
  const int64_t most_items =
      std::clamp<int64_t>(kMostKept / static_cast<int64_t>(sizeof(T)) / std::max<int64_t>(item_size, 1), 1, g.batch);
  const int64_t blocks = CeilDiv(g.batch, most_items);
  const int64_t items_at_once = CeilDiv(g.batch, blocks);
  const int64_t panels = CeilDiv(items_at_once * g.small_size, kPanel);
  const int64_t panel_size = tiles.rows() * kPanel + kMostPlacesOfTile;
  // Few panels are copied before, and split by tiles of channels.
  constexpr int64_t kTasks = 16;
  const bool is_split = panels * g.groups < kTasks;
  const int64_t parts = is_split ? std::min(CeilDiv(kTasks, panels * g.groups), tiles.count()) : 1;
  const int64_t tiles_of_part = CeilDiv(tiles.count(), parts);
  std::vector<int64_t> shifts;
  std::vector<int64_t> shifts_of_panel;
  for (int64_t tap = 0; tap < taps; ++tap) {
    shifts.push_back(-(planes.plane_of_tap(tap) * plane_size + planes.shift_of_tap(tap)));
    shifts_of_panel.push_back(-tap * kPanel);
  }
  const Scratch<T> packed(items_at_once * item_size + planes.largest_shift() + kMostPlacesOfTile);
  const Scratch<T> shared(is_split ? panels * g.groups * panel_size : 0);
  if (packed.data() == nullptr || shared.data() == nullptr) throw std::bad_alloc();
  Findings findings;
  for (int64_t first = 0; first < g.batch; first += items_at_once) {
    const int64_t items = std::min(items_at_once, g.batch - first);
    const int64_t places = items * g.small_size;
    parallel(items * channels, 2 * items * item_size * static_cast<int64_t>(sizeof(T)), [&](int64_t task) {
      planes.PackLarge(pack, large + (first * channels + task) * g.large_size, packed.data() + task * channel_size,
                       plane_size);
    });
    const auto copy = [&](int64_t panel, int64_t group, T* to) {
      const int64_t begin = panel * kPanel;
      const std::vector<Piece> pieces = planes.PiecesOfSmall(begin, std::min(places, begin + kPanel), item_size);
      copy_panel({packed.data() + group * g.large_channels * channel_size, channel_size, g.large_channels,
                  shifts.data(), taps, pieces.data(), static_cast<int64_t>(pieces.size()), to});
    };
    if (is_split) {
      parallel(panels * g.groups, 2 * panels * g.groups * panel_size * static_cast<int64_t>(sizeof(T)),
               [&](int64_t task) {
                 if (task / g.groups * kPanel >= places) return;
                 copy(task / g.groups, task % g.groups, shared.data() + task * panel_size);
               });
    }
    parallel(panels * g.groups * parts, places * g.groups * g.small_channels * tiles.rows(), [&](int64_t task) {
      const int64_t part = task % parts;
      const int64_t group = task / parts % g.groups;
      const int64_t panel = task / parts / g.groups;
      const int64_t begin = panel * kPanel;
      const int64_t end = std::min(places, begin + kPanel);
      if (begin >= end) return;
      const Scratch<T> own(is_split ? 0 : panel_size);
      if (own.data() == nullptr) {
        findings.no_memory = true;
        return;
      }
      if (!is_split) copy(panel, group, own.data());
      alignas(64) T sums[kChannelsAtOnce * kPanel + kMostPlacesOfTile];
      Filters<T> filters{};
      filters.planes = is_split ? shared.data() + (panel * g.groups + group) * panel_size : own.data();
      filters.plane_pitch = taps * kPanel;
      filters.plane_count = g.large_channels;
      filters.shifts = shifts_of_panel.data();
      filters.tap_count = taps;
      filters.weight_pitch = tiles.rows();
      filters.place_count = end - begin;
      filters.sums = sums;
      filters.sums_pitch = kPanel;
      bool is_finite = true;
      for (int64_t tile = part * tiles_of_part; tile < std::min(tiles.count(), (part + 1) * tiles_of_part); ++tile) {
        filters.weights = tiles.Of(group, tile);
        add_filters(filters, tiles.at_once() == 1);
        const int64_t first_channel = tile * tiles.at_once();
        for (int64_t one = first_channel; one < std::min(g.small_channels, first_channel + tiles.at_once()); ++one) {
          const int64_t channel = group * g.small_channels + one;
          for (int64_t place = begin; place < end;) {
            const int64_t item = place / g.small_size;
            const int64_t count = std::min(end, (item + 1) * g.small_size) - place;
            T* const to = out + ((first + item) * g.groups * g.small_channels + channel) * g.small_size;
            is_finite &= write(sums + (one - first_channel) * kPanel + place - begin, count, 1, count,
                               finishes.Of(channel), to + place % g.small_size);
            place += count;
          }
        }
      }
      if (!is_finite) findings.not_finite = true;
    });
  }
  if (findings.no_memory) throw std::bad_alloc();
  return !findings.not_finite;
}

// Measured: copying a row of a panel takes as long as multiplying it with 12 channels.
bool PaysByPanel(const Geometry& g, const PackedPlanes& planes) {
  constexpr int64_t kFewestChannels = 128;
  return g.small_channels >= kFewestChannels && (planes.count() > 1 || planes.size() * 20 >= g.small_size * 21);
}

// Measured: with few windows and many channels, windows take less to pack than zeros take to multiply, and few products
// less than the sums of their lanes.
bool HasFewWindows(const Geometry& g) {
  return g.batch * g.small_size <= std::clamp<int64_t>(4 * g.small_channels, 64, 512);
}

// Whether packed planes are about as large as the tensors: padding and dilation may be billions.
bool CanPack(const Geometry& g) {
  constexpr double kSmall = 1 << 16;
  constexpr double kMostTimes = 16;
  double packed = 1;
  for (int axis = 0; axis < Geometry::kSpatial; ++axis) {
    const auto stride = static_cast<double>(g.stride[axis]);
    const double reach = static_cast<double>(g.kernel[axis] - 1) * static_cast<double>(g.dilation[axis]);
    packed *= std::min(stride, static_cast<double>(g.kernel[axis])) *
              (static_cast<double>(g.small[axis]) + reach / stride + 1);
  }
  return packed <= std::max(kSmall, kMostTimes * static_cast<double>(g.small_size + g.large_size));
}

bool IsEmpty(const Geometry& g) { return g.batch * g.small_size * g.small_channels * g.large_channels == 0; }

}  // namespace

template <class T>
void TransposedConvolution(const Geometry& g, const T* small, const T* weight, T* out, const ParallelFor& parallel) {
  const bool by_loops = IsEmpty(g) || !CanPack(g);
  if (!by_loops && PaysByWindows(g)) {
    SumsOfWindows(g, small, weight, out, parallel);
  } else if (by_loops || !SumsOfPlanes(g, small, weight, out, parallel)) {
    direct::TransposedConvolution(g, small, weight, out, parallel);
  }
}

template <class T>
void Convolution(const Geometry& g, const T* large, const T* weight, const T* bias, bool relu, T* out,
                 const ParallelFor& parallel) {
  if (!IsEmpty(g) && CanPack(g)) {
    const PackedPlanes planes(g);
    const Finishes<T> finishes{bias, relu};
    const bool is_finite = PaysByPanel(g, planes) ? SumsOfPanels(g, planes, large, weight, finishes, out, parallel)
                                                  : SumsOfLarge(g, planes, large, weight, finishes, out, parallel);
    const int64_t weights = g.groups * g.small_channels * g.large_channels * g.kernel_size;
    const auto is_number = [](T one) { return one * 0 == 0; };
    if (is_finite || std::all_of(weight, weight + weights, is_number)) return;
  }
  direct::Convolution(g, large, weight, bias, relu, out, parallel);
}

template <class T>
void GradWeight(const Geometry& g, const T* small, const T* large, T* out, const ParallelFor& parallel) {
  if (IsEmpty(g)) {
    std::fill_n(out, g.groups * g.small_channels * g.large_channels * g.kernel_size, T{});
    return;
  }
  const bool by_channel = g.small_channels == 1 && g.large_channels == 1;
  const bool is_done = !CanPack(g)        ? false
                       : by_channel       ? ProductsOfChannels(g, small, large, out, parallel)
                       : HasFewWindows(g) ? ProductsOfWindows(g, small, large, out, parallel)
                                          : ProductsOfPlanes(g, small, large, out, parallel);
  if (!is_done) direct::GradWeight(g, small, large, out, parallel);
}

template void Convolution(const Geometry&, const float*, const float*, const float*, bool, float*, const ParallelFor&);
template void Convolution(const Geometry&, const double*, const double*, const double*, bool, double*,
                          const ParallelFor&);
template void TransposedConvolution(const Geometry&, const float*, const float*, float*, const ParallelFor&);
template void TransposedConvolution(const Geometry&, const double*, const double*, double*, const ParallelFor&);
template void GradWeight(const Geometry&, const float*, const float*, float*, const ParallelFor&);
template void GradWeight(const Geometry&, const double*, const double*, double*, const ParallelFor&);

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
