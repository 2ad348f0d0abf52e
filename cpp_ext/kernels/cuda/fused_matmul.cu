#include "gradfuse/ops/fused_matmul.h"
#include "kernels/batch_of_matrices.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kTile = 64;   // rows and columns of a block's part of the product
constexpr int kDepth = 16;  // of the parts of factors that are in shared memory at once
constexpr int kSide = 16;   // threads of a block, each way
constexpr int kThreads = kSide * kSide;
constexpr int kOwn = kTile / kSide;  // rows and columns of a thread

template <class T, class B>
struct Params {
  const T* a;
  const B* b;
  const T* bias;
  T* out;
  MatrixOfFactor a_matrix;
  MatrixOfFactor b_matrix;
  int64_t batch;
  int64_t rows;
  int64_t depth;
  int64_t columns;
  int64_t row_tiles;
  int64_t column_tiles;
  bool trans_a;
  bool trans_b;
  bool narrows;
};

// A number of a factor as it is multiplied.
template <class T>
__device__ float Factor(T number, bool narrows) {
  return narrows ? Widen(Narrow<BFloat16>(Widen(number))) : Widen(number);
}

// A block takes tiles of the product; a thread adds up each kSide-th row and column of a tile.
template <class T, class B>
__global__ void __launch_bounds__(kThreads) Output(const __grid_constant__ Params<T, B> p) {
  GRADFUSE_SHARED(float, left, kDepth* kTile);
  GRADFUSE_SHARED(float, right, kDepth* kTile);
  const int thread = static_cast<int>(threadIdx.x);
  const int own_row = thread / kSide;
  const int own_column = thread % kSide;
  for (int64_t tile = blockIdx.x; tile < p.batch * p.row_tiles * p.column_tiles; tile += gridDim.x) {
    const int64_t column = tile % p.column_tiles * kTile;
    const int64_t row = tile / p.column_tiles % p.row_tiles * kTile;
    const int64_t matrix = tile / p.column_tiles / p.row_tiles;
    const T* a = p.a + p.a_matrix(matrix) * p.rows * p.depth;
    const B* b = p.b + p.b_matrix(matrix) * p.depth * p.columns;
    float sums[kOwn][kOwn] = {};
    for (int64_t k = 0; k < p.depth; k += kDepth) {
      for (int i = thread; i < kDepth * kTile; i += kThreads) {
        // Neighbouring threads read neighbouring elements.
        const int a_line = p.trans_a ? i % kTile : i / kDepth;
        const int a_deep = p.trans_a ? i / kTile : i % kDepth;
        const int64_t at_row = row + a_line;
        const int64_t a_depth = k + a_deep;
        const bool in_a = at_row < p.rows && a_depth < p.depth;
        const int64_t a_index = p.trans_a ? a_depth * p.rows + at_row : at_row * p.depth + a_depth;
        left[a_deep * kTile + a_line] = in_a ? Factor(a[a_index], p.narrows) : 0.0F;
        const int b_line = p.trans_b ? i / kDepth : i % kTile;
        const int b_deep = p.trans_b ? i % kDepth : i / kTile;
        const int64_t at_column = column + b_line;
        const int64_t b_depth = k + b_deep;
        const bool in_b = at_column < p.columns && b_depth < p.depth;
        const int64_t b_index = p.trans_b ? at_column * p.depth + b_depth : b_depth * p.columns + at_column;
        right[b_deep * kTile + b_line] = in_b ? Factor(b[b_index], p.narrows) : 0.0F;
      }
      Barrier();
      for (int deep = 0; deep < kDepth; ++deep) {
        for (int r = 0; r < kOwn; ++r) {
          for (int c = 0; c < kOwn; ++c) {
            sums[r][c] += left[deep * kTile + own_row + r * kSide] * right[deep * kTile + own_column + c * kSide];
          }
        }
      }
      Barrier();
    }
    for (int r = 0; r < kOwn; ++r) {
      for (int c = 0; c < kOwn; ++c) {
        const int64_t at_row = row + own_row + r * kSide;
        const int64_t at_column = column + own_column + c * kSide;
        if (at_row < p.rows && at_column < p.columns) {
          const float added = p.bias == nullptr ? 0.0F : Widen(p.bias[at_column]);
          p.out[(matrix * p.rows + at_row) * p.columns + at_column] = Narrow<T>(sums[r][c] + added);
        }
      }
    }
  }
}

template <class T, class B>
Status RunTyped(const FusedMatmulArgs& args, const Queue& queue) {
  const Shape& shape = args.output.shape;
  Params<T, B> params{args.a.Data<T>(),
                      args.b.Data<B>(),
                      args.bias ? args.bias->Data<T>() : nullptr,
                      args.output.MutableData<T>(),
                      MatrixOfFactor(shape, args.a.shape),
                      MatrixOfFactor(shape, args.b.shape),
                      MatrixCount(shape),
                      args.Rows(),
                      args.Depth(),
                      args.Columns(),
                      CeilDiv(args.Rows(), kTile),
                      CeilDiv(args.Columns(), kTile),
                      args.trans_a != 0,
                      args.trans_b != 0,
                      args.factors_in_bfloat16 != 0};
  return Launch(queue, Output<T, B>, params.batch * params.row_tiles * params.column_tiles, kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const FusedMatmulArgs&) { return 0; }

Status Run(const FusedMatmulArgs& args, const Queue& queue) {
  if (args.output.NumElements() == 0) return {};
  return WithShortFloatType(args.a.dtype, [&](auto a_type) {
    return WithShortFloatType(args.b.dtype,
                              [&](auto b_type) { return RunTyped<decltype(a_type), decltype(b_type)>(args, queue); });
  });
}

}  // namespace gradfuse::cuda
