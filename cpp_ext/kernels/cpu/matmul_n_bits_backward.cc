#include "gradfuse/ops/matmul_n_bits_backward.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul_n_bits_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/packed_weight-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

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
  const int64_t depth = args.OutFeatures();
  const int64_t columns = args.in_features;
  const T* const grad = args.grad_output.Data<T>();
  const T* const scales = args.scales.Data<T>();
  T* const out = args.grad_input.MutableData<T>();
  const auto dequantize = GRADFUSE_DISPATCH(Dequantize<T, kBits>);
  const auto pack = GRADFUSE_DISPATCH(Pack<T>);
  const auto add = GRADFUSE_DISPATCH(AddProducts);
  const auto write = GRADFUSE_DISPATCH(Write<T>);

  const auto run = [&](int64_t column, int64_t panels, int64_t first, int64_t count) {
    const int64_t end = std::min(column + panels * kPanel, args.Blocks() * args.BlockSize());
    std::vector<PanelRow> sums(static_cast<size_t>(panels * count));
    std::vector<float> packed(static_cast<size_t>(count * kDeep));
    std::vector<PanelRow> floats(static_cast<size_t>(panels * kDeep));
    std::vector<int64_t> places(static_cast<size_t>(panels * kPanel));
    ForEachPart(args, column, end, [&](int64_t at, int64_t next) {
      const int64_t begin = (at - column) % kPanel;
      ForEachPlace<kBits>(
          next - at, [&](int64_t place, int64_t i) { places[static_cast<size_t>(at - column + i)] = begin + place; });
    });
    for (int64_t row = 0; row < depth; row += kDeep) {
      const int64_t deep = std::min(kDeep, depth - row);
      ForEachPart(args, column, end, [&](int64_t at, int64_t next) {
        const int64_t panel = (at - column) / kPanel;
        PackedPart part = PartOf(args, row, deep, at, next);
        part.numbers_ahead = kDeep * part.number_pitch;
        part.scales_ahead = kDeep * part.scale_pitch;
        dequantize(part, scales, floats[static_cast<size_t>(panel * kDeep)].numbers + (at - column) % kPanel);
      });
      pack(grad + first * depth + row, depth, count, deep, packed.data());
      for (int64_t panel = 0; panel < panels; ++panel) {
        add(packed.data(), floats[static_cast<size_t>(panel * kDeep)].numbers, count, deep,
            sums[static_cast<size_t>(panel * count)].numbers);
      }
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t at = column + panel * kPanel;
      write(sums[static_cast<size_t>(panel * count)].numbers, places.data() + panel * kPanel, count,
            std::min(kPanel, columns - at), columns, out + first * columns + at);
    }
  };
  ForEachPartOfProduct(args.Rows(), columns, depth, parallel, run);
}

}  // namespace

void Run(const MatmulNBitsBackwardArgs& args, const ParallelFor& parallel) {
  if (args.grad_input.NumElements() == 0) return;
  WithShortFloatType(args.grad_output.dtype, [&](auto type) {
    using T = decltype(type);
    WithBits(args.bits, [&](auto bits) { RunTyped<T, decltype(bits)::value>(args, parallel); });
  });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
