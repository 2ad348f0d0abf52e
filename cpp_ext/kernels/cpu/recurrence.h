#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "gradfuse/float16.h"
#include "gradfuse/parallel.h"
#include "gradfuse/tensor.h"
#include "kernels/dispatch.h"

namespace gradfuse::cpu {

// How the steps of a recurrent layer are divided among threads. A step is cut into panels, neighbouring units of the
// layer, and rows, the items of the batch. A panel's weights are read for all rows of a call, and its results need all
// panels of the step before.
class RecurrentTasks {
 public:
  RecurrentTasks(int64_t steps, int64_t batch, int64_t units, int64_t gates, int64_t panels)
      : steps_(steps), batch_(batch), panels_(panels), weights_(gates * units * units) {}

  // Calls step(t, panel, first_row, rows) for t = 0, ..., steps - 1, every panel and all rows, in this order as far as
  // a row is concerned. Items of a batch never wait for each other; small batches of large layers wait after each step.
  template <class Step>
  void Run(const ParallelFor& parallel, const Step& step) const {
    const int64_t cost = weights_ * batch_ / kProductsPerByte;
    if (batch_ < kLargeBatch && weights_ >= kManyWeights) {
      for (int64_t t = 0; t < steps_; ++t) {
        parallel(panels_, cost, [&](int64_t panel) { step(t, panel, 0, batch_); });
      }
      return;
    }
    const int64_t rows = batch_ < kLargeBatch ? kFewRows : weights_ < kManyWeights ? kSomeRows : kManyRows;
    parallel(CeilDiv(batch_, rows), steps_ * cost, [&](int64_t block) {
      const int64_t first = block * rows;
      for (int64_t t = 0; t < steps_; ++t) {
        for (int64_t panel = 0; panel < panels_; ++panel) step(t, panel, first, std::min(rows, batch_ - first));
      }
    });
  }

 private:
  static constexpr int64_t kProductsPerByte = 4;  // that take as long as a byte that is moved
  static constexpr int64_t kLargeBatch = 16;
  static constexpr int64_t kManyWeights = 256 << 10;  // which leave the second-level cache
  // The rows of a task, which all weights are read for: the more of them, the less that costs.
  static constexpr int64_t kFewRows = 4;
  static constexpr int64_t kSomeRows = 8;
  static constexpr int64_t kManyRows = 16;

  int64_t steps_;
  int64_t batch_;
  int64_t panels_;
  int64_t weights_;
};

// The numbers of a tensor in float32, zeros where there is none.
template <class T>
std::vector<float> Widened(const std::optional<Tensor>& tensor, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  if (tensor) {
    const T* from = tensor->Data<T>();
    std::transform(from, from + count, values.begin(), [](T value) { return ToCompute(value); });
  }
  return values;
}

// What steps hand to those behind them, in float32: rows of a result in this type, or a pair of buffers.
template <class T>
class HandedOn {
 public:
  // The first state and the states of all steps, of `size` numbers each.
  HandedOn(const Tensor& first, const MutableTensor& states, int64_t size) : size_(size) {
    if constexpr (std::is_same_v<T, float>) {
      first_ = first.Data<float>();
      states_ = states.MutableData<float>();
    } else {
      buffers_ = Widened<T>(first, size);
      buffers_.resize(static_cast<size_t>(2 * size));
    }
  }
  // The same without a first state.
  HandedOn(const MutableTensor& states, int64_t size) : size_(size) {
    if constexpr (std::is_same_v<T, float>) {
      states_ = states.MutableData<float>();
    } else {
      buffers_.resize(static_cast<size_t>(2 * size));
    }
  }

  // What step t finds, and where it writes; `place` and `place_before` are those of its states and of the step before.
  const float* Before(int64_t t, int64_t place_before) const {
    if constexpr (!std::is_same_v<T, float>) return buffers_.data() + t % 2 * size_;
    return t == 0 ? first_ : states_ + place_before * size_;
  }
  float* After(int64_t t, int64_t place) {
    if constexpr (!std::is_same_v<T, float>) return buffers_.data() + (t + 1) % 2 * size_;
    return states_ + place * size_;
  }

 private:
  int64_t size_;
  const float* first_ = nullptr;
  float* states_ = nullptr;
  std::vector<float> buffers_;
};

}  // namespace gradfuse::cpu
