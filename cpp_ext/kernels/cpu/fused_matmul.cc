#include "gradfuse/ops/fused_matmul.h"

#include <algorithm>
#include <type_traits>

#include "kernels/batch_of_matrices.h"
#include "kernels/cpu/matrix_products.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fused_matmul.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// Writes sums, plus a bias where there is one.
template <class T>
void Write(const float* sums, int64_t sums_pitch, const T* bias, int64_t rows, int64_t columns, T* out,
           int64_t out_pitch) {
  const TagOf<T> d;
  for (int64_t row = 0; row < rows; ++row) {
    const float* const from = sums + row * sums_pitch;
    T* const to = out + row * out_pitch;
    ForEachVector(d, columns, [&](int64_t i, auto at) HWY_ATTR {
      auto sum = Load(at, d, from + i);
      if (bias != nullptr) sum = sum + Load(at, d, bias + i);
      Store(at, sum, d, to + i);
    });
  }
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// A block of the product takes as many rows and columns, unless that leaves too few tasks for the threads. Packed
// factors of some depth and the sums of a block stay in the second-level cache, or nearly.
constexpr int64_t kMostRows = 480;
constexpr int64_t kMostColumns = 512;
constexpr int64_t kDepthTogether = 512;
constexpr int64_t kMostTasks = 8;
constexpr int64_t kProductsOfTask = 4 << 20;
constexpr int64_t kProductsOfByte = 10;  // as long as a byte takes to move

int64_t RoundUp(int64_t number, int64_t multiple) { return CeilDiv(number, multiple) * multiple; }

// Blocks of one size that cover so many rows or columns.
struct Blocks {
  int64_t total = 0;
  int64_t multiple = 1;
  int64_t size = 0;

  int64_t Count() const { return CeilDiv(total, size); }
  void DivideInto(int64_t count) { size = RoundUp(CeilDiv(total, count), multiple); }
  bool CanDivide() const { return size > multiple; }
};

// A matrix of a factor.
struct Factor {
  const void* data;
  DType dtype;
  int64_t row_pitch;
  int64_t column_pitch;

  template <class T>
  Matrix<T> At(int64_t row, int64_t column) const {
    return {static_cast<const T*>(data) + row * row_pitch + column * column_pitch, row_pitch, column_pitch};
  }
};

// The matrix that an index of the product's matrices belongs to.
Factor FactorOf(const Tensor& tensor, int64_t matrix, int64_t rows, int64_t columns, bool is_transposed) {
  const char* const data = static_cast<const char*>(tensor.data) + matrix * rows * columns * SizeOf(tensor.dtype);
  if (is_transposed) return {data, tensor.dtype, 1, rows};
  return {data, tensor.dtype, columns, 1};
}

// Packs parts of factors, as bfloat16 or as they are, and multiplies them.
struct Packing {
  bool narrow;

  int64_t Depth(int64_t depth) const { return narrow ? PairedDepth(depth) : depth; }

  void PackLeftPart(const Factor& factor, int64_t row, int64_t k, int64_t rows, int64_t depth, float* packed) const {
    WithShortFloatType(factor.dtype, [&](auto type) {
      const auto part = factor.At<decltype(type)>(row, k);
      narrow ? PackLeftPairs(part, rows, depth, packed) : PackLeft(part, rows, depth, packed);
    });
  }

  void PackRightPart(const Factor& factor, int64_t k, int64_t column, int64_t depth, int64_t columns,
                     float* packed) const {
    WithShortFloatType(factor.dtype, [&](auto type) {
      const auto part = factor.At<decltype(type)>(k, column);
      narrow ? PackRightPairs(part, depth, columns, packed) : PackRight(part, depth, columns, packed);
    });
  }

  void Multiply(const float* left, const float* right, int64_t rows, int64_t columns, int64_t depth, float* product,
                int64_t pitch, bool adds) const {
    const auto multiply = narrow ? MultiplyPairs : MultiplyPacked<float>;
    multiply(left, right, rows, columns, Depth(depth), product, pitch, adds);
  }
};

template <class T>
void RunTyped(const FusedMatmulArgs& args, const ParallelFor& parallel) {
  const Shape& shape = args.output.shape;
  int64_t row_count = args.Rows();
  int64_t batch = MatrixCount(shape);
  if (args.trans_a == 0 && MatrixCount(args.b.shape) == 1) {
    row_count *= batch;
    batch = 1;
  }
  const int64_t depth = args.Depth();
  const int64_t column_count = args.Columns();
  const T* const bias = args.bias ? args.bias->Data<T>() : nullptr;
  // Of one matrix that all rows are in, the index is 0.
  const MatrixOfFactor a_matrix(shape, args.a.shape);
  const MatrixOfFactor b_matrix(shape, args.b.shape);
  const auto write = GRADFUSE_DISPATCH(Write<T>);
  const bool are_narrow = args.a.dtype == DType::kBFloat16 && args.b.dtype == DType::kBFloat16;
  const Packing packing{args.factors_in_bfloat16 != 0 || are_narrow};

  Blocks rows{row_count, TileRows()};
  Blocks columns{column_count, TileColumns<float>()};
  rows.DivideInto(CeilDiv(row_count, kMostRows));
  columns.DivideInto(CeilDiv(column_count, kMostColumns));
  const int64_t products = batch * row_count * column_count * std::max<int64_t>(depth, 1);
  const int64_t wanted = std::min(kMostTasks, products / kProductsOfTask);
  while (batch * rows.Count() * columns.Count() < wanted && (rows.CanDivide() || columns.CanDivide())) {
    Blocks& larger = rows.size >= columns.size ? rows : columns;
    larger.DivideInto(2 * larger.Count());
  }

  const auto run = [&](int64_t task) {
    const int64_t column = task % columns.Count() * columns.size;
    const int64_t row = task / columns.Count() % rows.Count() * rows.size;
    const int64_t matrix = task / columns.Count() / rows.Count();
    const int64_t width = std::min(columns.size, column_count - column);
    const int64_t height = std::min(rows.size, row_count - row);
    const Factor a = FactorOf(args.a, a_matrix(matrix), row_count, depth, args.trans_a != 0);
    const Factor b = FactorOf(args.b, b_matrix(matrix), depth, column_count, args.trans_b != 0);
    T* const out = args.output.MutableData<T>() + (matrix * row_count + row) * column_count + column;

    const int64_t deepest = std::min(depth, kDepthTogether);
    const Lines<float> left(PackedLeftSize<float>(height, packing.Depth(deepest)));
    const Lines<float> right(PackedRightSize<float>(packing.Depth(deepest), width));
    Lines<float> sums;
    float* product = nullptr;
    int64_t pitch = column_count;
    if constexpr (std::is_same_v<T, float>) {
      product = out;
    } else {
      sums = Lines<float>(height * columns.size);
      product = sums.data();
      pitch = columns.size;
    }
    for (int64_t k = 0; k < depth || k == 0; k += kDepthTogether) {
      const int64_t deep = std::min(kDepthTogether, depth - k);
      packing.PackLeftPart(a, row, k, height, deep, left.data());
      packing.PackRightPart(b, k, column, deep, width, right.data());
      packing.Multiply(left.data(), right.data(), height, width, deep, product, pitch, k > 0);
    }
    if (!std::is_same_v<T, float> || bias != nullptr) {
      write(product, pitch, bias == nullptr ? nullptr : bias + column, height, width, out, column_count);
    }
  };
  parallel(batch * rows.Count() * columns.Count(), products / kProductsOfByte, run);
}

}  // namespace

void Run(const FusedMatmulArgs& args, const ParallelFor& parallel) {
  if (args.output.NumElements() == 0) return;
  WithShortFloatType(args.a.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
