#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "gradfuse/parallel.h"
#include "gradfuse/tensor.h"
#include "kernels/cpu/task_memory.h"
#include "kernels/dispatch.h"

// Tensors of 16 bits as loops that compute in 32 bits see them.
namespace gradfuse::cpu {

// Widens numbers of at most 32 bits. With `rounds` they are rounded to bfloat16 before.
void WidenAll(const Tensor& tensor, bool rounds, float* to, const ParallelFor& parallel);

// Rounds numbers to a 16-bit type.
template <class T>
void NarrowAll(const float* from, int64_t count, T* to, const ParallelFor& parallel);

// An input in the type that it is computed in: 16 bits are widened. With `rounds` it is rounded to bfloat16 before.
template <class Real>
class Operand {
 public:
  Operand(const Tensor& tensor, const ParallelFor& parallel, bool rounds = false) : data_(tensor.Data<Real>()) {
    if constexpr (std::is_same_v<Real, float>) {
      if (tensor.dtype == DType::kFloat32 && !rounds) return;
      wide_.emplace(tensor.NumElements());
      WidenAll(tensor, rounds, wide_->data(), parallel);
      data_ = wide_->data();
    }
  }

  const Real* data() const { return data_; }

 private:
  const Real* data_;
  std::optional<KeptMemory<Real>> wide_;
};

// The same for an output, which is rounded once.
template <class T>
class Result {
 public:
  using Real = ComputeType<T>;

  explicit Result(const MutableTensor& tensor) : tensor_(tensor) {
    if constexpr (!std::is_same_v<T, Real>) wide_.emplace(tensor.NumElements());
  }

  Real* data() const {
    if constexpr (std::is_same_v<T, Real>) {
      return tensor_.MutableData<T>();
    } else {
      return wide_ ? wide_->data() : nullptr;
    }
  }

  void Finish(const ParallelFor& parallel) const {
    if constexpr (!std::is_same_v<T, Real>) {
      if (wide_) NarrowAll(wide_->data(), tensor_.NumElements(), tensor_.MutableData<T>(), parallel);
    }
  }

 private:
  const MutableTensor& tensor_;
  std::optional<KeptMemory<Real>> wide_;
};

}  // namespace gradfuse::cpu
