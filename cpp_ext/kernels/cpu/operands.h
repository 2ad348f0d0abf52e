#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "gradfuse/parallel.h"
#include "gradfuse/tensor.h"
#include "kernels/dispatch.h"

// Tensors of 16 bits as loops that compute in 32 bits see them.
namespace gradfuse::cpu {

inline constexpr int64_t kConversionTask = 32768;

// An input in the type that it is computed in: 16 bits are widened.
template <class T>
class Operand {
 public:
  using Real = ComputeType<T>;

  Operand(const Tensor& tensor, const ParallelFor& parallel) {
    if constexpr (std::is_same_v<T, Real>) {
      data_ = tensor.Data<T>();
    } else {
      const int64_t count = tensor.NumElements();
      wide_.resize(static_cast<size_t>(count));
      const T* from = tensor.Data<T>();
      parallel(CeilDiv(count, kConversionTask), 3 * tensor.NumBytes(), [&](int64_t task) {
        const int64_t end = std::min(count, (task + 1) * kConversionTask);
        for (int64_t i = task * kConversionTask; i < end; ++i) wide_[static_cast<size_t>(i)] = ToCompute(from[i]);
      });
      data_ = wide_.data();
    }
  }

  const Real* data() const { return data_; }

 private:
  const Real* data_;
  std::vector<Real> wide_;
};

// The same for an output, which is rounded once.
template <class T>
class Result {
 public:
  using Real = ComputeType<T>;

  explicit Result(const MutableTensor& tensor) : tensor_(tensor) {
    if constexpr (!std::is_same_v<T, Real>) wide_.resize(static_cast<size_t>(tensor.NumElements()));
  }

  Real* data() {
    if constexpr (std::is_same_v<T, Real>) {
      return tensor_.MutableData<T>();
    } else {
      return wide_.data();
    }
  }

  void Finish(const ParallelFor& parallel) const {
    if constexpr (!std::is_same_v<T, Real>) {
      const int64_t count = tensor_.NumElements();
      T* to = tensor_.MutableData<T>();
      parallel(CeilDiv(count, kConversionTask), 3 * tensor_.NumBytes(), [&](int64_t task) {
        const int64_t end = std::min(count, (task + 1) * kConversionTask);
        for (int64_t i = task * kConversionTask; i < end; ++i) {
          to[i] = FromCompute<T>(wide_[static_cast<size_t>(i)]);
        }
      });
    }
  }

 private:
  const MutableTensor& tensor_;
  std::vector<Real> wide_;
};

}  // namespace gradfuse::cpu
