#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/recurrence.h"

namespace gradfuse::cuda {

constexpr int kRecurrenceThreads = 128;

// A recurrent layer: a block has an item, and each of its threads some of the units, in all steps.
struct Recurrence {
  int64_t steps;
  int64_t items;
  int64_t units;
  bool reverse;

  Recurrence() = default;
  Recurrence(const RecurrenceSizes& sizes, bool reversed)
      : steps(sizes.steps), items(sizes.batch), units(sizes.units), reverse(reversed) {}

  // Where in a tensor (T, N, width) the row of an item is at the step that comes as number t.
  __device__ int64_t Row(int64_t t, int64_t item) const { return (reverse ? steps - 1 - t : t) * items + item; }
};

__device__ inline float SigmoidOf(float x) { return 1.0F / (1.0F + Exp(-x)); }

// turned (units, gates units) = weight (gates units, units): neighbouring threads read neighbouring numbers.
template <class T>
__global__ void __launch_bounds__(kRecurrenceThreads)
    TurnWeight(const T* weight, int64_t rows, int64_t units, float* turned) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kRecurrenceThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRecurrenceThreads + threadIdx.x; i < rows * units; i += stride) {
    turned[i % units * rows + i / units] = Widen(weight[i]);
  }
}

// sums[gate] = the product of a state with the weights of a unit in each gate.
template <int kGates>
__device__ void MultiplyState(const float* state, const float* turned, int64_t units, int64_t unit, float* sums) {
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) sums[gate] = 0;
  for (int64_t k = 0; k < units; ++k) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) sums[gate] += state[k] * turned[(k * kGates + gate) * units + unit];
  }
}

// The gradient of a unit of the state, of the gradients of all gates.
template <class T>
__device__ float MultiplyGradients(const float* grads, const T* weight, int64_t rows, int64_t units, int64_t unit) {
  float sum = 0;
  for (int64_t k = 0; k < rows; ++k) sum += grads[k] * Widen(weight[k * units + unit]);
  return sum;
}

}  // namespace gradfuse::cuda
