#include "kernels/cpu/matrix_products.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matrix_products.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

// What the loops of all instruction sets share.
//
// A packed factor is cut into blocks of kDepth, and these into panels, of as many rows or columns as a tile has: in a
// panel, the numbers of a tile's rows (columns) lie side by side for each step of the depth. The last panel is
// narrower.
#ifndef GRADFUSE_MATRIX_PRODUCTS_SHARED
#define GRADFUSE_MATRIX_PRODUCTS_SHARED
namespace gradfuse::cpu {
namespace {

constexpr int kVectors = 2;  // of a row of a tile
// A panel of the right factor stays in the first-level cache while those of the left one pass, and these stay in the
// second-level cache while those of the right one pass.
template <class Real>
constexpr int64_t kDepth = 1024 / static_cast<int64_t>(sizeof(Real));
constexpr int64_t kRowsTogether = 240;

// What packed factors are: numbers as they are, rounded to bfloat16, or pairs of such.
enum class Packed { kNumbers, kRounded, kPairs };

// How the left factor lies.
enum class Left { kPacked, kByRows, kByColumns };

template <class Real>
struct Factors {
  const Real* left;
  int64_t left_pitch;  // of rows or columns that are not packed; 0 of those that are
  const Real* right;
  int64_t rows;
  int64_t columns;
  int64_t depth;
};

template <class Real>
struct Product {
  Real* numbers;
  int64_t pitch;
  bool adds;
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// With the sums of a tile, there are registers left for a row of the right factor and a number of the left one.
#if GRADFUSE_AVX512 || (GRADFUSE_HAS_VECTORS && defined(__aarch64__))
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

template <class Real>
constexpr auto kLanes = static_cast<int64_t>(hn::MaxLanes(TagOf<Real>()));
template <class Real>
constexpr int64_t kTileColumns = kVectors * kLanes<Real>;

int64_t RowsOfTile() { return kTileRows; }
template <class Real>
int64_t ColumnsOfTile() {
  return kTileColumns<Real>;
}
// Columns that are there and those that fill the last vector.
template <class Real>
int64_t FilledColumns(int64_t columns) {
  return CeilDiv(columns, kLanes<Real>) * kLanes<Real>;
}

// Numbers as they are multiplied: rounded to bfloat16, or as they are.
template <bool kRounds, class T, class At, class D>
GRADFUSE_INLINE hn::Vec<D> LoadFactor(At at, D d, const T* from) {
  const auto numbers = Load(at, d, from);
  if constexpr (kRounds) return Widened(d, RoundedToBFloat16(d, numbers), static_cast<const BFloat16*>(nullptr));
  return numbers;
}
template <bool kRounds, class T>
ComputeType<T> LoadFactor(const T* from) {
  if constexpr (kRounds) return ToCompute(FromCompute<BFloat16>(ToCompute(*from)));
  return ToCompute(*from);
}

// Packs a panel: `count` lines, each of `depth` numbers, whose neighbours lie line_pitch and depth_pitch apart. Behind
// the lines are zeros up to a width of `filled`.
template <bool kRounds, class T>
void PackPanel(const T* from, int64_t line_pitch, int64_t depth_pitch, int64_t count, int64_t depth, int64_t filled,
               ComputeType<T>* to) {
  using Real = ComputeType<T>;
  const TagOf<T> d;
  if (filled != count) {
    for (int64_t k = 0; k < depth; ++k) std::fill(to + k * filled + count, to + (k + 1) * filled, Real{0});
  }
  if (line_pitch == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      ForEachVector(d, count, [&](int64_t line, auto at) HWY_ATTR {
        Store(at, LoadFactor<kRounds>(at, d, from + k * depth_pitch + line), d, to + k * filled + line);
      });
    }
    return;
  }
  int64_t line = 0;
#if GRADFUSE_HAS_VECTORS
  if (depth_pitch == 1) {
    const BlockTag<Real> block_tag;
    constexpr int kBlock = 16 / sizeof(Real);
    for (; line + kBlock <= count; line += kBlock) {
      const T* const lines = from + line * line_pitch;
      int64_t k = 0;
      for (; k + kBlock <= depth; k += kBlock) {
        hn::Vec<BlockTag<Real>> block[kBlock];
        for (int i = 0; i < kBlock; ++i) block[i] = LoadFactor<kRounds>(Whole(), block_tag, lines + i * line_pitch + k);
        Transpose(block_tag, block);
        for (int i = 0; i < kBlock; ++i) hn::StoreU(block[i], block_tag, to + (k + i) * filled + line);
      }
      for (; k < depth; ++k) {
        for (int i = 0; i < kBlock; ++i) to[k * filled + line + i] = LoadFactor<kRounds>(lines + i * line_pitch + k);
      }
    }
  }
#endif
  for (; line < count; ++line) {
    for (int64_t k = 0; k < depth; ++k) {
      to[k * filled + line] = LoadFactor<kRounds>(from + line * line_pitch + k * depth_pitch);
    }
  }
}

#if GRADFUSE_AVX512_BF16
// Packs a panel of pairs: each float has the bits of two numbers that are neighbours in depth; behind an odd depth the
// second is 0.
template <class T>
void PackPairs(const T* from, int64_t line_pitch, int64_t depth_pitch, int64_t count, int64_t depth, int64_t filled,
               float* to) {
  const TagOf<float> d;
  if (filled != count) {
    for (int64_t k = 0; k < depth; k += 2) std::fill(to + k / 2 * filled + count, to + (k / 2 + 1) * filled, 0.0F);
  }
  if (line_pitch == 1) {
    for (int64_t k = 0; k < depth; k += 2) {
      const T* const first = from + k * depth_pitch;
      const bool has_second = k + 1 < depth;
      ForEachVector(d, count, [&](int64_t line, auto at) HWY_ATTR {
        const auto pairs = LoadPairs(at, d, first + line, has_second ? first + depth_pitch + line : nullptr);
        at.StoreBits(pairs, d, to + k / 2 * filled + line);
      });
    }
    return;
  }
  const auto pack_pair = [&](int64_t line, int64_t k) {
    const T* const first = from + line * line_pitch + k * depth_pitch;
    const auto bits_of = [](const T& number) { return uint32_t{FromCompute<BFloat16>(ToCompute(number)).bits}; };
    const uint32_t bits = bits_of(*first) | (k + 1 < depth ? bits_of(first[depth_pitch]) << 16 : 0);
    std::memcpy(to + k / 2 * filled + line, &bits, sizeof bits);
  };
  int64_t line = 0;
  if (depth_pitch == 1) {
    constexpr int kBlock = 4;
    const BlockTag<float> block_tag;
    const hn::FixedTag<float, 2 * kBlock> numbers;
    for (; line + kBlock <= count; line += kBlock) {
      const T* const lines = from + line * line_pitch;
      int64_t k = 0;
      for (; k + 2 * kBlock <= depth; k += 2 * kBlock) {
        hn::Vec<BlockTag<float>> block[kBlock];
        for (int i = 0; i < kBlock; ++i) {
          block[i] = hn::BitCast(block_tag, LoadBFloat16(Whole(), numbers, lines + i * line_pitch + k));
        }
        Transpose(block_tag, block);
        for (int i = 0; i < kBlock; ++i) hn::StoreU(block[i], block_tag, to + (k / 2 + i) * filled + line);
      }
      for (; k < depth; k += 2) {
        for (int i = 0; i < kBlock; ++i) pack_pair(line + i, k);
      }
    }
  }
  for (; line < count; ++line) {
    for (int64_t k = 0; k < depth; k += 2) pack_pair(line, k);
  }
}
#endif

// Packs the lines of a factor, rows or columns, panel by panel.
template <Packed kPacked, int64_t kLines, class T, class Filled>
void PackLines(const T* from, int64_t line_pitch, int64_t depth_pitch, int64_t lines, int64_t depth,
               const Filled& filled_of, ComputeType<T>* packed) {
  constexpr int64_t kNumbers = kPacked == Packed::kPairs ? 2 : 1;
  constexpr int64_t kDeep = kDepth<ComputeType<T>> * kNumbers;
  for (int64_t k = 0; k < depth; k += kDeep) {
    const int64_t deep = std::min(kDeep, depth - k);
    for (int64_t line = 0; line < lines; line += kLines) {
      const int64_t count = std::min(kLines, lines - line);
      const int64_t filled = filled_of(count);
      const T* const panel = from + line * line_pitch + k * depth_pitch;
      if constexpr (kPacked == Packed::kPairs) {
        PackPairs(panel, line_pitch, depth_pitch, count, deep, filled, packed);
      } else {
        PackPanel<kPacked == Packed::kRounded>(panel, line_pitch, depth_pitch, count, deep, filled, packed);
      }
      packed += filled * CeilDiv(deep, kNumbers);
    }
  }
}

template <Packed kPacked, class T>
void PackRows(const Matrix<T>& left, int64_t rows, int64_t depth, ComputeType<T>* packed) {
  PackLines<kPacked, kTileRows>(
      left.data, left.row_pitch, left.column_pitch, rows, depth, [](int64_t count) { return count; }, packed);
}

template <Packed kPacked, class T>
void PackColumns(const Matrix<T>& right, int64_t depth, int64_t columns, ComputeType<T>* packed) {
  using Real = ComputeType<T>;
  PackLines<kPacked, kTileColumns<Real>>(right.data, right.column_pitch, right.row_pitch, columns, depth,
                                         FilledColumns<Real>, packed);
}

// A tile of kRows rows and kWide vectors, of which the last has `last` columns.
template <int kRows, int kWide, Left kLeft, bool kPairs, class Real>
void MultiplyTile(const Real* left, int64_t left_pitch, const Real* right, int64_t depth, int64_t last,
                  const Product<Real>& product) {
  const TagOf<Real> d;
  using V = hn::Vec<TagOf<Real>>;
  V sums[kRows][kWide];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kWide; ++v) sums[r][v] = hn::Zero(d);
  }
  for (int64_t k = 0; k < depth; ++k) {
    V columns[kWide];
#pragma GCC unroll 2
    for (int v = 0; v < kWide; ++v) {
      columns[v] = hn::LoadU(d, right + (k * kWide + v) * kLanes<Real>);
      KeepInRegister(columns[v]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      V factor = hn::Set(d, kLeft == Left::kPacked   ? left[k * kRows + r]
                            : kLeft == Left::kByRows ? left[r * left_pitch + k]
                                                     : left[k * left_pitch + r]);
      KeepInRegister(factor);
#pragma GCC unroll 2
      for (int v = 0; v < kWide; ++v) sums[r][v] = AddProduct<kPairs>(factor, columns[v], sums[r][v]);
    }
  }
  const auto [to, pitch, adds] = product;
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kWide; ++v) {
      Real* const at = to + r * pitch + v * kLanes<Real>;
      if (v + 1 < kWide || last == kLanes<Real>) {
        hn::StoreU(adds ? hn::LoadU(d, at) + sums[r][v] : sums[r][v], d, at);
      } else {
        const auto there = static_cast<size_t>(last);
        hn::StoreN(adds ? hn::LoadN(d, at, there) + sums[r][v] : sums[r][v], d, at, there);
      }
    }
  }
}

template <class Real>
using Tile = void (*)(const Real*, int64_t, const Real*, int64_t, int64_t, const Product<Real>&);

template <int kWide, Left kLeft, bool kPairs, class Real, size_t... kRowsLessOne>
constexpr std::array<Tile<Real>, kTileRows> TilesOf(std::index_sequence<kRowsLessOne...>) {
  return {&MultiplyTile<kRowsLessOne + 1, kWide, kLeft, kPairs, Real>...};
}

template <Left kLeft, bool kPairs, class Real>
void MultiplyBlock(const Factors<Real>& factors, const Product<Real>& product) {
  constexpr auto kCounts = std::make_index_sequence<kTileRows>();
  static constexpr std::array<std::array<Tile<Real>, kTileRows>, kVectors> kTiles = {
      TilesOf<1, kLeft, kPairs, Real>(kCounts), TilesOf<2, kLeft, kPairs, Real>(kCounts)};
  const auto [left, left_pitch, right, rows, columns, depth] = factors;
  const int64_t row_step = kLeft == Left::kPacked ? depth : kLeft == Left::kByRows ? left_pitch : 1;
  for (int64_t column = 0; column < columns; column += kTileColumns<Real>) {
    const int64_t vectors = CeilDiv(std::min(kTileColumns<Real>, columns - column), kLanes<Real>);
    const int64_t last = std::min(kLanes<Real>, columns - column - (vectors - 1) * kLanes<Real>);
    const auto& tiles = kTiles[static_cast<size_t>(vectors - 1)];
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t count = std::min<int64_t>(kTileRows, rows - row);
      tiles[static_cast<size_t>(count - 1)](
          left + row * row_step, left_pitch, right + column * depth, depth, last,
          {product.numbers + row * product.pitch + column, product.pitch, product.adds});
    }
  }
}

template <Left kLeft, bool kPairs, class Real>
void MultiplyAll(const Factors<Real>& factors, const Product<Real>& product) {
  const auto [left, left_pitch, right, rows, columns, depth] = factors;
  const int64_t filled = FilledColumns<Real>(columns);
  for (int64_t k = 0; k < depth || k == 0; k += kDepth<Real>) {
    const int64_t deep = std::min(kDepth<Real>, depth - k);
    for (int64_t row = 0; row < rows; row += kRowsTogether) {
      const int64_t begin = kLeft == Left::kPacked   ? k * rows + row * deep
                            : kLeft == Left::kByRows ? row * left_pitch + k
                                                     : k * left_pitch + row;
      MultiplyBlock<kLeft, kPairs, Real>(
          {left + begin, left_pitch, right + k * filled, std::min(kRowsTogether, rows - row), columns, deep},
          {product.numbers + row * product.pitch, product.pitch, product.adds || k > 0});
    }
  }
}

constexpr Packed kNarrow = kMultipliesPairs ? Packed::kPairs : Packed::kRounded;

int64_t DepthOfPairs(int64_t depth) { return kMultipliesPairs ? CeilDiv(depth, 2) : depth; }
template <class T>
void PackNarrowRows(const Matrix<T>& left, int64_t rows, int64_t depth, float* packed) {
  PackRows<kNarrow>(left, rows, depth, packed);
}
template <class T>
void PackNarrowColumns(const Matrix<T>& right, int64_t depth, int64_t columns, float* packed) {
  PackColumns<kNarrow>(right, depth, columns, packed);
}
void MultiplyAllPairs(const Factors<float>& factors, const Product<float>& product) {
  MultiplyAll<Left::kPacked, kMultipliesPairs>(factors, product);
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {

void AskForHugePages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef __linux__
  constexpr size_t kMany = 4 << 20;
  constexpr uintptr_t kPage = 4096;
  if (bytes < kMany) return;
  const uintptr_t behind = reinterpret_cast<uintptr_t>(memory) % kPage;
  const uintptr_t skipped = behind == 0 ? 0 : kPage - behind;
  madvise(static_cast<char*>(memory) + skipped, bytes - skipped, MADV_HUGEPAGE);  // else pages are small
#endif
}

int64_t TileRows() { return GRADFUSE_DISPATCH(RowsOfTile)(); }
template <class Real>
int64_t TileColumns() {
  return GRADFUSE_DISPATCH(ColumnsOfTile<Real>)();
}
template <class Real>
int64_t PackedLeftSize(int64_t rows, int64_t depth) {
  return rows * depth;
}
template <class Real>
int64_t PackedRightSize(int64_t depth, int64_t columns) {
  return depth * GRADFUSE_DISPATCH(FilledColumns<Real>)(columns);
}
template <class T>
void PackLeft(const Matrix<T>& left, int64_t rows, int64_t depth, ComputeType<T>* packed) {
  GRADFUSE_DISPATCH(PackRows<Packed::kNumbers, T>)(left, rows, depth, packed);
}
template <class T>
void PackRight(const Matrix<T>& right, int64_t depth, int64_t columns, ComputeType<T>* packed) {
  GRADFUSE_DISPATCH(PackColumns<Packed::kNumbers, T>)(right, depth, columns, packed);
}
template <class Real>
void MultiplyPacked(const Real* left, const Real* right, int64_t rows, int64_t columns, int64_t depth, Real* product,
                    int64_t pitch, bool adds) {
  GRADFUSE_DISPATCH(MultiplyAll<Left::kPacked, /*kPairs=*/false, Real>)({left, 0, right, rows, columns, depth},
                                                                        {product, pitch, adds});
}
template <class Real>
void MultiplyRows(const Real* left, int64_t left_pitch, const Real* right, int64_t rows, int64_t columns, int64_t depth,
                  Real* product, int64_t pitch, bool adds) {
  GRADFUSE_DISPATCH(MultiplyAll<Left::kByRows, /*kPairs=*/false, Real>)({left, left_pitch, right, rows, columns, depth},
                                                                        {product, pitch, adds});
}
template <class Real>
void MultiplyColumns(const Real* left, int64_t left_pitch, const Real* right, int64_t rows, int64_t columns,
                     int64_t depth, Real* product, int64_t pitch, bool adds) {
  GRADFUSE_DISPATCH(MultiplyAll<Left::kByColumns, /*kPairs=*/false, Real>)
  ({left, left_pitch, right, rows, columns, depth}, {product, pitch, adds});
}

int64_t PairedDepth(int64_t depth) { return GRADFUSE_DISPATCH(DepthOfPairs)(depth); }
template <class T>
void PackLeftPairs(const Matrix<T>& left, int64_t rows, int64_t depth, float* packed) {
  GRADFUSE_DISPATCH(PackNarrowRows<T>)(left, rows, depth, packed);
}
template <class T>
void PackRightPairs(const Matrix<T>& right, int64_t depth, int64_t columns, float* packed) {
  GRADFUSE_DISPATCH(PackNarrowColumns<T>)(right, depth, columns, packed);
}
void MultiplyPairs(const float* left, const float* right, int64_t rows, int64_t columns, int64_t paired_depth,
                   float* product, int64_t pitch, bool adds) {
  GRADFUSE_DISPATCH(MultiplyAllPairs)({left, 0, right, rows, columns, paired_depth}, {product, pitch, adds});
}

#define GRADFUSE_OF_REAL(Real)                                                                                    \
  template int64_t TileColumns<Real>();                                                                           \
  template int64_t PackedLeftSize<Real>(int64_t, int64_t);                                                        \
  template int64_t PackedRightSize<Real>(int64_t, int64_t);                                                       \
  template void MultiplyPacked(const Real*, const Real*, int64_t, int64_t, int64_t, Real*, int64_t, bool);        \
  template void MultiplyRows(const Real*, int64_t, const Real*, int64_t, int64_t, int64_t, Real*, int64_t, bool); \
  template void MultiplyColumns(const Real*, int64_t, const Real*, int64_t, int64_t, int64_t, Real*, int64_t, bool);
GRADFUSE_OF_REAL(float)
GRADFUSE_OF_REAL(double)
#undef GRADFUSE_OF_REAL
#define GRADFUSE_OF_TYPE(T)                                                    \
  template void PackLeft(const Matrix<T>&, int64_t, int64_t, ComputeType<T>*); \
  template void PackRight(const Matrix<T>&, int64_t, int64_t, ComputeType<T>*);
GRADFUSE_OF_TYPE(float)
GRADFUSE_OF_TYPE(double)
GRADFUSE_OF_TYPE(Half)
GRADFUSE_OF_TYPE(BFloat16)
#undef GRADFUSE_OF_TYPE
#define GRADFUSE_OF_SHORT_TYPE(T)                                          \
  template void PackLeftPairs(const Matrix<T>&, int64_t, int64_t, float*); \
  template void PackRightPairs(const Matrix<T>&, int64_t, int64_t, float*);
GRADFUSE_OF_SHORT_TYPE(float)
GRADFUSE_OF_SHORT_TYPE(Half)
GRADFUSE_OF_SHORT_TYPE(BFloat16)
#undef GRADFUSE_OF_SHORT_TYPE

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
