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

// What the forward passes of recurrent layers share.
template <class T>
struct RecurrentForward {
  Recurrence layer;
  const T* input;
  const T* initial_h;
  const T* weight;
  const T* bias;  // or null
  T* hidden;
  T* gates;
  // Workspace.
  float* turned;  // (H, gates H)
  float* h;       // (N, 2, H): of a step and the one before

  template <class Args>
  RecurrentForward(const Args& args, int64_t gates, Workspace& workspace)
      : layer(RecurrenceSizes(args.input.shape, gates), args.reverse != 0),
        input(args.input.template Data<T>()),
        initial_h(args.initial_h.template Data<T>()),
        weight(args.weight.template Data<T>()),
        bias(args.bias ? args.bias->template Data<T>() : nullptr),
        hidden(args.hidden.template MutableData<T>()),
        gates(args.gates.template MutableData<T>()),
        turned(workspace.Array<float>(gates * layer.units * layer.units)),
        h(workspace.Array<float>(2 * layer.items * layer.units)) {}
};

// All steps of a layer. A cell has this `forward`, kGates, and for a unit of an item
//   Begin(item, unit)                       what comes before the first step
//   Step(item, row, unit, before, products) the new state, of the one before and its products with the weight
template <class T, class Cell>
__global__ void __launch_bounds__(kRecurrenceThreads) RunForwardSteps(const __grid_constant__ Cell cell) {
  const RecurrentForward<T>& forward = cell.forward;
  const Recurrence& layer = forward.layer;
  const int64_t units = layer.units;
  for (int64_t item = blockIdx.x; item < layer.items; item += gridDim.x) {
    float* states[2] = {forward.h + 2 * item * units, forward.h + (2 * item + 1) * units};
    for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
      states[0][unit] = Widen(forward.initial_h[item * units + unit]);
      cell.Begin(item, unit);
    }
    for (int64_t t = 0; t < layer.steps; ++t) {
      Barrier();
      const int64_t row = layer.Row(t, item);
      for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
        float products[Cell::kGates];
        MultiplyState<Cell::kGates>(states[t % 2], forward.turned, units, unit, products);
        const float hidden = cell.Step(item, row, unit, states[t % 2][unit], products);
        states[(t + 1) % 2][unit] = hidden;
        forward.hidden[row * units + unit] = Narrow<T>(hidden);
      }
    }
    Barrier();
  }
}

template <template <class> class Cell, class Args>
Status RunForward(const Args& args, const Queue& queue) {
  return WithShortFloatType(args.weight.dtype, [&](auto type) {
    using T = decltype(type);
    Workspace workspace(queue.workspace);
    const Cell<T> cell(args, workspace);
    const Recurrence& layer = cell.forward.layer;
    const int64_t rows = Cell<T>::kGates * layer.units;
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, TurnWeight<T>, CeilDiv(rows * layer.units, kRecurrenceThreads),
                                    kRecurrenceThreads, cell.forward.weight, rows, layer.units, cell.forward.turned));
    return Launch(queue, RunForwardSteps<T, Cell<T>>, layer.items, kRecurrenceThreads, cell);
  });
}

// What the backward passes of recurrent layers share.
template <class T>
struct RecurrentBackward {
  Recurrence layer;
  const T* grad_hidden;
  const T* gates;
  const T* weight;
  T* grad_input;
  T* grad_initial_h;
  float* grads;  // workspace (N, 2, gates H): of what is multiplied with the weight in a step and the one behind it

  template <class Args>
  RecurrentBackward(const Args& args, int64_t gates, Workspace& workspace)
      : layer(RecurrenceSizes(args.grad_hidden.shape, 1), args.reverse != 0),
        grad_hidden(args.grad_hidden.template Data<T>()),
        gates(args.gates.template Data<T>()),
        weight(args.weight.template Data<T>()),
        grad_input(args.grad_input.template MutableData<T>()),
        grad_initial_h(args.grad_initial_h.template MutableData<T>()),
        grads(workspace.Array<float>(2 * gates * layer.items * layer.units)) {}
};

// All steps of a layer from the last to the first. A cell has this `backward`, kGates, and for a unit of an item
//   Step(t, item, unit, from_later, grads)  with what comes from the step behind it through the weight, none in the
//                                           last; grads[gate * units] are those of the unit
//   End(item, unit, from_later)             what is behind the first step
template <class T, class Cell>
__global__ void __launch_bounds__(kRecurrenceThreads) RunBackwardSteps(const __grid_constant__ Cell cell) {
  const RecurrentBackward<T>& backward = cell.backward;
  const Recurrence& layer = backward.layer;
  const int64_t units = layer.units;
  const int64_t rows = Cell::kGates * units;
  for (int64_t item = blockIdx.x; item < layer.items; item += gridDim.x) {
    float* grads[2] = {backward.grads + 2 * item * rows, backward.grads + (2 * item + 1) * rows};
    for (int64_t t = layer.steps - 1; t >= 0; --t) {
      Barrier();
      for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
        const float from_later =
            t == layer.steps - 1 ? 0 : MultiplyGradients(grads[(t + 1) % 2], backward.weight, rows, units, unit);
        cell.Step(t, item, unit, from_later, grads[t % 2] + unit);
      }
    }
    Barrier();
    for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
      cell.End(item, unit, layer.steps == 0 ? 0 : MultiplyGradients(grads[0], backward.weight, rows, units, unit));
    }
  }
}

template <template <class> class Cell, class Args>
Status RunBackward(const Args& args, const Queue& queue) {
  return WithShortFloatType(args.weight.dtype, [&](auto type) {
    using T = decltype(type);
    Workspace workspace(queue.workspace);
    const Cell<T> cell(args, workspace);
    return Launch(queue, RunBackwardSteps<T, Cell<T>>, cell.backward.layer.items, kRecurrenceThreads, cell);
  });
}

template <template <class> class Cell, class Args>
int64_t BytesOf(const Args& args) {
  Workspace workspace(nullptr);
  WithShortFloatType(args.weight.dtype, [&](auto type) { Cell<decltype(type)>(args, workspace); });
  return workspace.bytes();
}

}  // namespace gradfuse::cuda
