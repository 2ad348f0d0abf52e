#include "gradfuse/ops/matmul_n_bits_backward.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul_n_bits_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_MATMUL_N_BITS_BACKWARD_SHARED
#define GRADFUSE_MATMUL_N_BITS_BACKWARD_SHARED
namespace gradfuse::cpu {
namespace {

constexpr int64_t kPanel = 64;    // columns of the weight in floats: a whole number of tiles in each instruction set
constexpr int64_t kDeep = 128;    // rows of the weight in floats
constexpr int64_t kTall = 256;    // rows of the gradient
constexpr int64_t kTileRows = 6;  // whose sums are in registers
// A thread takes several panels at once, as the gradient is read again for the next ones; fewer where they are few.
constexpr int64_t kMostTogether = 4;
constexpr int64_t kFewTasks = 16;

// Neighbouring columns of neighbouring rows of a weight, within a block of each row.
struct PackedPart {
  const uint8_t* numbers;  // of the first row: the byte in which the first column begins
  int64_t number_pitch;
  const uint8_t* zero_points;  // of the first row: the byte with that of the block; null where there are none
  int64_t zero_point_pitch;
  int zero_point_shift;
  int64_t scale_pitch;
  int64_t rows;
  int64_t columns;
};

// In lines of the cache of its own, which vectors do not cross.
struct alignas(64) PanelRow {
  float numbers[kPanel];
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

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
    Prefetch(FloatTag(), bytes + kDeep * part.number_pitch);
    Prefetch(FloatTag(), scales + (row + kDeep) * part.scale_pitch);
    int zero_point = 1 << (kBits - 1);
    if (part.zero_points != nullptr) {
      zero_point = (part.zero_points[row * part.zero_point_pitch] >> part.zero_point_shift) & kMask;
    }
    const float scale = ToCompute(scales[row * part.scale_pitch]);
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

// Copies rows of the gradient, `depth` numbers each, with kDeep from one to the next.
template <class T>
void Pack(const T* grad, int64_t pitch, int64_t rows, int64_t depth, float* to) {
  const FloatTag d;
  for (int64_t row = 0; row < rows; ++row) {
    ForEachVector(d, depth, [&](int64_t i, auto at) HWY_ATTR {
      Store(at, Load(at, d, grad + row * pitch + i), d, to + row * kDeep + i);
    });
  }
}

template <int64_t kRows>
GRADFUSE_INLINE void AddTile(const float* grad, const float* weight, int64_t depth, float* sums) {
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
      const auto factor = hn::Set(d, grad[r * kDeep + k]);
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
GRADFUSE_INLINE void AddLast(int64_t rows, const float* grad, const float* weight, int64_t depth, float* sums) {
  if (rows == kRows) return AddTile<kRows>(grad, weight, depth, sums);
  if constexpr (kRows > 1) AddLast<kRows - 1>(rows, grad, weight, depth, sums);
}

// sums (rows, kPanel) += grad (rows, depth) times weight (depth, kPanel).
void AddProducts(const float* grad, const float* weight, int64_t rows, int64_t depth, float* sums) {
  const int64_t step = kTileVectors * static_cast<int64_t>(hn::Lanes(FloatTag()));
  for (int64_t column = 0; column < kPanel; column += step) {
    int64_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows) {
      AddTile<kTileRows>(grad + row * kDeep, weight + column, depth, sums + row * kPanel + column);
    }
    AddLast<kTileRows - 1>(rows - row, grad + row * kDeep, weight + column, depth, sums + row * kPanel + column);
  }
}

// Writes sums, whose columns are at `places`.
template <class T>
void Write(const float* sums, const int64_t* places, int64_t rows, int64_t columns, int64_t pitch, T* out) {
  const FloatTag d;
  float ordered[kPanel];
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) ordered[i] = sums[row * kPanel + places[i]];
    ForEachVector(d, columns,
                  [&](int64_t i, auto at) HWY_ATTR { Store(at, Load(at, d, ordered + i), d, out + row * pitch + i); });
  }
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T, int kBits>
void RunTyped(const MatmulNBitsBackwardArgs& args, const ParallelFor& parallel) {
  const int64_t rows = args.Rows();
  const int64_t depth = args.weight.shape[0];
  const int64_t columns = args.in_features;
  const int64_t blocks = args.Blocks();
  const int64_t size = args.BlockSize();
  const T* const grad = args.grad_output.Data<T>();
  const T* const scales = args.scales.Data<T>();
  const auto* const weight = args.weight.Data<uint8_t>();
  const auto* const zero_points = args.zero_points ? args.zero_points->Data<uint8_t>() : nullptr;
  T* const out = args.grad_input.MutableData<T>();
  const auto dequantize = GRADFUSE_DISPATCH(Dequantize<T, kBits>);
  const auto pack = GRADFUSE_DISPATCH(Pack<T>);
  const auto add = GRADFUSE_DISPATCH(AddProducts);
  const auto write = GRADFUSE_DISPATCH(Write<T>);

  constexpr int64_t kProductsPerByte = 4;  // that take as long as a byte that is moved
  const int64_t panels = CeilDiv(columns, kPanel);
  const int64_t together = std::clamp(panels / kFewTasks, int64_t{1}, kMostTogether);
  const int64_t tasks = CeilDiv(panels, together);
  parallel(tasks * CeilDiv(rows, kTall), rows * depth * columns / kProductsPerByte, [&](int64_t task) {
    const int64_t column = task % tasks * together * kPanel;
    const int64_t end = std::min(column + together * kPanel, blocks * size);
    const int64_t first = task / tasks * kTall;
    const int64_t count = std::min(kTall, rows - first);
    std::vector<PanelRow> sums(static_cast<size_t>(together * count));
    std::vector<float> packed(static_cast<size_t>(count * kDeep));
    std::vector<PanelRow> floats(static_cast<size_t>(together * kDeep));
    std::vector<int64_t> places(static_cast<size_t>(together * kPanel));
    for (int64_t row = 0; row < depth; row += kDeep) {
      const int64_t deep = std::min(kDeep, depth - row);
      for (int64_t at = column; at < end;) {
        const int64_t block = at / size;
        const int64_t panel = (at - column) / kPanel;
        const int64_t next = std::min({end, (block + 1) * size, column + (panel + 1) * kPanel});
        PackedPart part{};
        part.numbers = weight + (row * blocks * size + at) * kBits / 8;
        part.number_pitch = blocks * size * kBits / 8;
        if (zero_points != nullptr) {
          part.zero_point_pitch = args.ZeroPointBytes();
          part.zero_points = zero_points + row * part.zero_point_pitch + block * kBits / 8;
          part.zero_point_shift = static_cast<int>(block * kBits % 8);
        }
        part.scale_pitch = blocks;
        part.rows = deep;
        part.columns = next - at;
        const int64_t begin = (at - column) % kPanel;
        dequantize(part, scales + row * blocks + block, floats[static_cast<size_t>(panel * kDeep)].numbers + begin);
        if (row == 0) {
          constexpr int64_t kPerByte = 8 / kBits;
          const int64_t of_byte = part.columns / kPerByte;
          for (int64_t i = 0; i < part.columns; ++i) {
            places[static_cast<size_t>(at - column + i)] = begin + i % kPerByte * of_byte + i / kPerByte;
          }
        }
        at = next;
      }
      pack(grad + first * depth + row, depth, count, deep, packed.data());
      for (int64_t panel = 0; panel * kPanel < end - column; ++panel) {
        add(packed.data(), floats[static_cast<size_t>(panel * kDeep)].numbers, count, deep,
            sums[static_cast<size_t>(panel * count)].numbers);
      }
    }
    for (int64_t at = column; at < std::min(end, columns); at += kPanel) {
      const int64_t panel = (at - column) / kPanel;
      write(sums[static_cast<size_t>(panel * count)].numbers, places.data() + panel * kPanel, count,
            std::min(kPanel, columns - at), columns, out + first * columns + at);
    }
  });
}

}  // namespace

void Run(const MatmulNBitsBackwardArgs& args, const ParallelFor& parallel) {
  if (args.grad_input.NumElements() == 0) return;
  WithShortFloatType(args.grad_output.dtype, [&](auto type) {
    using T = decltype(type);
    switch (args.bits) {
      case 2: return RunTyped<T, 2>(args, parallel);
      case 4: return RunTyped<T, 4>(args, parallel);
      default: return RunTyped<T, 8>(args, parallel);
    }
  });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
