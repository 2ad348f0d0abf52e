#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "gradfuse/packed_weight.h"
#include "gradfuse/parallel.h"
#include "kernels/dispatch.h"

namespace gradfuse::cpu {

constexpr int64_t kPanel = 64;    // columns of a product: a whole number of tiles in each instruction set
constexpr int64_t kDeep = 128;    // products that are added up before others are
constexpr int64_t kTall = 256;    // rows of a product
constexpr int64_t kTileRows = 6;  // whose sums are in registers
// A thread takes several panels at once, as what is multiplied is read again for the next ones; fewer where they are
// few.
constexpr int64_t kMostTogether = 4;
constexpr int64_t kFewTasks = 16;

// Calls use(bits) with a number that the compiler knows: 2, 4 or 8.
template <class Use>
void WithBits(int64_t bits, const Use& use) {
  switch (bits) {
    case 2: return use(std::integral_constant<int, 2>());
    case 4: return use(std::integral_constant<int, 4>());
    default: return use(std::integral_constant<int, 8>());
  }
}

// Neighbouring columns of neighbouring rows of a weight, within a block of each row.
struct PackedPart {
  const uint8_t* numbers;  // of the first row: the byte in which the first column begins
  int64_t number_pitch;
  const uint8_t* zero_points;  // of the first row: the byte with that of the block; null where there are none
  int64_t zero_point_pitch;
  int zero_point_shift;
  int64_t scale;  // of the first row: its place among the scales
  int64_t scale_pitch;
  int64_t rows;
  int64_t columns;
  int64_t numbers_ahead;  // how far behind are the bytes that will be read after this part, and the scales
  int64_t scales_ahead;
};

// Columns from `column` to `end`, which lie in one block, of rows from `row` on.
inline PackedPart PartOf(const PackedWeight& args, int64_t row, int64_t rows, int64_t column, int64_t end) {
  const int64_t blocks = args.Blocks();
  const int64_t columns = blocks * args.BlockSize();
  const int64_t block = column / args.BlockSize();
  PackedPart part{};
  part.numbers = args.weight.Data<uint8_t>() + (row * columns + column) * args.bits / 8;
  part.number_pitch = columns * args.bits / 8;
  if (args.zero_points) {
    part.zero_point_pitch = args.ZeroPointBytes();
    part.zero_points = args.zero_points->Data<uint8_t>() + row * part.zero_point_pitch + block * args.bits / 8;
    part.zero_point_shift = static_cast<int>(block * args.bits % 8);
  }
  part.scale = row * blocks + block;
  part.scale_pitch = blocks;
  part.rows = rows;
  part.columns = end - column;
  return part;
}

// Calls use(begin, end) for the parts of columns [column, end) that lie in one block and in one panel from `column` on.
template <class Use>
void ForEachPart(const PackedWeight& args, int64_t column, int64_t end, const Use& use) {
  const int64_t size = args.BlockSize();
  for (int64_t at = column; at < end;) {
    const int64_t panel = (at - column) / kPanel;
    const int64_t next = std::min({end, (at / size + 1) * size, column + (panel + 1) * kPanel});
    use(at, next);
    at = next;
  }
}

// Calls use(place, column) for each column of a part: as floats they begin with the first number of each byte, and the
// second numbers follow.
template <int kBits, class Use>
void ForEachPlace(int64_t columns, const Use& use) {
  constexpr int64_t kPerByte = 8 / kBits;
  const int64_t of_byte = columns / kPerByte;
  for (int64_t i = 0; i < columns; ++i) use(i % kPerByte * of_byte + i / kPerByte, i);
}

// In lines of the cache of its own, which vectors do not cross.
struct alignas(64) PanelRow {
  float numbers[kPanel];
};

// Calls use(column, panels, row, rows) for parts of a product of `rows` rows and `columns` columns.
template <class Use>
void ForEachPartOfProduct(int64_t rows, int64_t columns, int64_t depth, const ParallelFor& parallel, const Use& use) {
  constexpr int64_t kProductsPerByte = 4;  // that take as long as a byte that is moved
  const int64_t panels = CeilDiv(columns, kPanel);
  const int64_t together = std::clamp(panels / kFewTasks, int64_t{1}, kMostTogether);
  const int64_t tasks = CeilDiv(panels, together);
  parallel(tasks * CeilDiv(rows, kTall), rows * depth * columns / kProductsPerByte, [&](int64_t task) {
    const int64_t panel = task % tasks * together;
    const int64_t row = task / tasks * kTall;
    use(panel * kPanel, std::min(together, panels - panel), row, std::min(kTall, rows - row));
  });
}

}  // namespace gradfuse::cpu
