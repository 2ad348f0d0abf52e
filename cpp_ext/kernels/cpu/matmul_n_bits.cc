#include "gradfuse/ops/matmul_n_bits.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul_n_bits.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/packed_weight-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// Writes kPanel rows of kPanel floats as columns: row places[i] of the result is their column i.
void Turn(const float* from, const int64_t* places, float* to) {
#if GRADFUSE_HAS_VECTORS
  const BlockTag<float> d;
  constexpr int kBlock = 4;
  for (int64_t column = 0; column < kPanel; column += kBlock) {
    for (int64_t row = 0; row < kPanel; row += kBlock) {
      hn::Vec<BlockTag<float>> block[kBlock];
      for (int i = 0; i < kBlock; ++i) block[i] = hn::LoadU(d, from + (row + i) * kPanel + column);
      Transpose(d, block);
      for (int i = 0; i < kBlock; ++i) hn::StoreU(block[i], d, to + places[column + i] * kPanel + row);
    }
  }
#else
  for (int64_t column = 0; column < kPanel; ++column) {
    for (int64_t row = 0; row < kPanel; ++row) to[places[column] * kPanel + row] = from[row * kPanel + column];
  }
#endif
}

// Writes sums, and a bias where there is one.
template <class T>
void Write(const float* sums, const T* bias, int64_t rows, int64_t columns, int64_t pitch, T* out) {
  const FloatTag d;
  for (int64_t row = 0; row < rows; ++row) {
    ForEachVector(d, columns, [&](int64_t i, auto at) HWY_ATTR {
      auto sum = Load(at, d, sums + row * kPanel + i);
      if (bias != nullptr) sum = sum + Load(at, d, bias + i);
      Store(at, sum, d, out + row * pitch + i);
    });
  }
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

constexpr int64_t kLine = 64;  // bytes of a line of the cache

template <class T, int kBits>
void RunTyped(const MatmulNBitsArgs& args, const ParallelFor& parallel) {
  const int64_t depth = args.InFeatures();
  const int64_t columns = args.OutFeatures();
  const T* const input = args.input.Data<T>();
  const T* const scales = args.scales.Data<T>();
  const T* const bias = args.bias ? args.bias->Data<T>() : nullptr;
  T* const out = args.output.MutableData<T>();
  const auto dequantize = GRADFUSE_DISPATCH(Dequantize<T, kBits>);
  const auto turn = GRADFUSE_DISPATCH(Turn);
  const auto pack = GRADFUSE_DISPATCH(Pack<T>);
  const auto add = GRADFUSE_DISPATCH(AddProducts);
  const auto write = GRADFUSE_DISPATCH(Write<T>);

  const auto run = [&](int64_t column, int64_t panels, int64_t first, int64_t count) {
    std::vector<PanelRow> sums(static_cast<size_t>(panels * count));
    std::vector<float> packed(static_cast<size_t>(count * kDeep));
    std::vector<PanelRow> floats(static_cast<size_t>(kPanel));
    std::vector<PanelRow> turned(static_cast<size_t>(panels * kDeep));
    int64_t places[kPanel];
    for (int64_t at = 0; at < depth; at += kDeep) {
      for (int64_t begin = at; begin < std::min(depth, at + kDeep); begin += kPanel) {
        const int64_t end = std::min(begin + kPanel, args.Blocks() * args.BlockSize());
        for (int64_t i = 0; i < kPanel; ++i) places[i] = i;
        ForEachPart(args, begin, end, [&](int64_t from, int64_t to) {
          ForEachPlace<kBits>(to - from,
                              [&](int64_t place, int64_t i) { places[from - begin + place] = from - begin + i; });
        });
        for (int64_t panel = 0; panel < panels; ++panel) {
          const int64_t row = column + panel * kPanel;
          ForEachPart(args, begin, end, [&](int64_t from, int64_t to) {
            PackedPart part = PartOf(args, row, std::min(kPanel, columns - row), from, to);
            part.numbers_ahead = kLine;
            part.scales_ahead = kLine / static_cast<int64_t>(sizeof(T));
            dequantize(part, scales, floats[0].numbers + (from - begin));
          });
          turn(floats[0].numbers, places, turned[static_cast<size_t>(panel * kDeep + begin - at)].numbers);
        }
      }
      const int64_t deep = std::min(kDeep, depth - at);
      pack(input + first * depth + at, depth, count, deep, packed.data());
      for (int64_t panel = 0; panel < panels; ++panel) {
        add(packed.data(), turned[static_cast<size_t>(panel * kDeep)].numbers, count, deep,
            sums[static_cast<size_t>(panel * count)].numbers);
      }
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t at = column + panel * kPanel;
      write(sums[static_cast<size_t>(panel * count)].numbers, bias == nullptr ? nullptr : bias + at, count,
            std::min(kPanel, columns - at), columns, out + first * columns + at);
    }
  };
  ForEachPartOfProduct(args.Rows(), columns, depth, parallel, run);
}

}  // namespace

void Run(const MatmulNBitsArgs& args, const ParallelFor& parallel) {
  if (args.output.NumElements() == 0) return;
  WithShortFloatType(args.input.dtype, [&](auto type) {
    using T = decltype(type);
    WithBits(args.bits, [&](auto bits) { RunTyped<T, decltype(bits)::value>(args, parallel); });
  });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
