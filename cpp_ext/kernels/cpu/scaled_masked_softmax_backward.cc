#include "gradfuse/ops/scaled_masked_softmax_backward.h"

#include <algorithm>

#include "kernels/dispatch.h"

namespace gradfuse::cpu {
namespace {

// Of a part of a row; the sums of parts add up in double, so that the error does not grow with the row.
template <class T>
GRADFUSE_MULTIVERSION float DotPart(const T* grad, const T* y, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += ToCompute(grad[i]) * ToCompute(y[i]);
  return sum;
}

template <class T>
float Dot(const T* grad, const T* y, int64_t count) {
  constexpr int64_t kPart = 2048;
  double sum = 0;
  for (int64_t i = 0; i < count; i += kPart) sum += DotPart(grad + i, y + i, std::min(kPart, count - i));
  return static_cast<float>(sum);
}

template <class T>
GRADFUSE_MULTIVERSION void GradRow(const T* grad, const T* y, float r, float scale, int64_t count, T* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = FromCompute<T>(scale * ToCompute(y[i]) * (ToCompute(grad[i]) - r));
}

template <class T>
GRADFUSE_MULTIVERSION void MaskedGradRow(const T* grad, const T* y, const uint8_t* mask, float r, float scale,
                                         int64_t count, T* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = scale * ToCompute(y[i]) * (ToCompute(grad[i]) - r);
    out[i] = FromCompute<T>(mask[i] != 0 ? 0.0f : value);
  }
}

template <class T>
void RunTyped(const ScaledMaskedSoftmaxBackwardArgs& args, const ParallelFor& parallel) {
  const Shape& shape = args.grad_output.shape;
  const int64_t heads = shape[1];
  const int64_t queries = shape[2];
  const int64_t size = shape[3];
  const int64_t rows = shape[0] * heads * queries;
  if (rows == 0 || size == 0) return;
  const T* grad_output = args.grad_output.Data<T>();
  const T* y = args.y.Data<T>();
  T* out = args.grad_input.MutableData<T>();
  const uint8_t* mask = args.mask ? args.mask->Data<uint8_t>() : nullptr;
  // 0 for a dimension along which one mask serves all.
  const int64_t mask_batch_stride = mask && args.mask->shape[0] != 1 ? args.mask->strides[0] : 0;
  const int64_t mask_head_stride = mask && args.mask->shape[1] != 1 ? args.mask->strides[1] : 0;

  // A row is swept twice, the second time out of the cache.
  const auto grad_row = [&](int64_t row) {
    const T* grad = grad_output + row * size;
    const T* y_row = y + row * size;
    const float r = Dot(grad, y_row, size);
    if (mask == nullptr) {
      GradRow(grad, y_row, r, args.scale, size, out + row * size);
      return;
    }
    const int64_t batch = row / (heads * queries);
    const int64_t head = row / queries % heads;
    const uint8_t* mask_row = mask + batch * mask_batch_stride + head * mask_head_stride + row % queries * size;
    MaskedGradRow(grad, y_row, mask_row, r, args.scale, size, out + row * size);
  };

  constexpr int64_t kTask = 16384;
  const int64_t rows_per_task = std::max<int64_t>(1, kTask / size);
  parallel(CeilDiv(rows, rows_per_task), 3 * args.y.NumBytes(), [&](int64_t task) {
    const int64_t first = task * rows_per_task;
    for (int64_t row = first; row < std::min(rows, first + rows_per_task); ++row) grad_row(row);
  });
}

}  // namespace

void Run(const ScaledMaskedSoftmaxBackwardArgs& args, const ParallelFor& parallel) {
  WithShortFloatType(args.y.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
