#include "gradfuse/ops/lstm_recurrence_backward.h"
#include "kernels/cuda/recurrence.cuh"

namespace gradfuse::cuda {
namespace {

template <class T>
struct Params {
  Recurrence layer;
  const T* grad_hidden;
  const T* grad_cell;  // or null
  const T* initial_c;
  const T* cell;
  const T* gates;
  const T* weight;
  T* grad_input;
  T* grad_initial_h;
  T* grad_initial_c;
  // Workspace.
  float* grads;       // (N, 2, 4 H): of the gates of a step and the one behind it
  float* grad_cells;  // (N, H): what comes from the step behind
};

template <class T>
__global__ void __launch_bounds__(kRecurrenceThreads) RunSteps(const __grid_constant__ Params<T> params) {
  const Recurrence& layer = params.layer;
  const int64_t units = layer.units;
  const int64_t rows = 4 * units;
  for (int64_t item = blockIdx.x; item < layer.items; item += gridDim.x) {
    float* grads[2] = {params.grads + 2 * item * rows, params.grads + (2 * item + 1) * rows};
    float* grad_cells = params.grad_cells + item * units;
    for (int64_t t = layer.steps - 1; t >= 0; --t) {
      Barrier();
      const bool is_last = t == layer.steps - 1;
      const int64_t row = layer.Row(t, item);
      for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
        const int64_t place = row * units + unit;
        const T* gates = params.gates + row * rows + unit;
        const float input_gate = Widen(gates[0]);
        const float forget_gate = Widen(gates[units]);
        const float new_cell = Widen(gates[2 * units]);
        const float output_gate = Widen(gates[3 * units]);
        const float before =
            Widen(t == 0 ? params.initial_c[item * units + unit] : params.cell[layer.Row(t - 1, item) * units + unit]);
        const float shown = tanhf(Widen(params.cell[place]));
        float grad = Widen(params.grad_hidden[place]);
        if (!is_last) grad += MultiplyGradients(grads[(t + 1) % 2], params.weight, rows, units, unit);
        float grad_cell = grad * output_gate * (1 - shown * shown);
        if (!is_last) grad_cell += grad_cells[unit];
        if (params.grad_cell != nullptr) grad_cell += Widen(params.grad_cell[place]);
        const float of_gates[4] = {
            grad_cell * new_cell * (input_gate * (1 - input_gate)),
            grad_cell * before * (forget_gate * (1 - forget_gate)),
            grad_cell * input_gate * (1 - new_cell * new_cell),
            grad * shown * (output_gate * (1 - output_gate)),
        };
        for (int gate = 0; gate < 4; ++gate) {
          grads[t % 2][gate * units + unit] = of_gates[gate];
          params.grad_input[row * rows + gate * units + unit] = Narrow<T>(of_gates[gate]);
        }
        grad_cells[unit] = grad_cell * forget_gate;
      }
    }
    Barrier();
    for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
      const bool is_empty = layer.steps == 0;
      const float grad = is_empty ? 0.0F : MultiplyGradients(grads[0], params.weight, rows, units, unit);
      params.grad_initial_h[item * units + unit] = Narrow<T>(grad);
      params.grad_initial_c[item * units + unit] = Narrow<T>(is_empty ? 0.0F : grad_cells[unit]);
    }
  }
}

template <class T>
void Place(Workspace& workspace, Params<T>& params) {
  const Recurrence& layer = params.layer;
  params.grads = workspace.Array<float>(8 * layer.items * layer.units);
  params.grad_cells = workspace.Array<float>(layer.items * layer.units);
}

template <class T>
Params<T> ParamsOf(const LstmRecurrenceBackwardArgs& args) {
  Params<T> params{};
  params.layer = Recurrence(RecurrenceSizes(args.grad_hidden.shape, 1), args.reverse != 0);
  return params;
}

template <class T>
Status RunTyped(const LstmRecurrenceBackwardArgs& args, const Queue& queue) {
  Params<T> params = ParamsOf<T>(args);
  params.grad_hidden = args.grad_hidden.Data<T>();
  params.grad_cell = args.grad_cell ? args.grad_cell->Data<T>() : nullptr;
  params.initial_c = args.initial_c.Data<T>();
  params.cell = args.cell.Data<T>();
  params.gates = args.gates.Data<T>();
  params.weight = args.weight.Data<T>();
  params.grad_input = args.grad_input.MutableData<T>();
  params.grad_initial_h = args.grad_initial_h.MutableData<T>();
  params.grad_initial_c = args.grad_initial_c.MutableData<T>();
  Workspace workspace(queue.workspace);
  Place(workspace, params);
  return Launch(queue, RunSteps<T>, params.layer.items, kRecurrenceThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const LstmRecurrenceBackwardArgs& args) {
  return WithShortFloatType(args.grad_hidden.dtype, [&](auto type) {
    auto params = ParamsOf<decltype(type)>(args);
    Workspace workspace(nullptr);
    Place(workspace, params);
    return workspace.bytes();
  });
}

Status Run(const LstmRecurrenceBackwardArgs& args, const Queue& queue) {
  return WithShortFloatType(args.grad_hidden.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
