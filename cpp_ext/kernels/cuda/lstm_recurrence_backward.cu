#include "gradfuse/ops/lstm_recurrence_backward.h"
#include "kernels/cuda/recurrence.cuh"

namespace gradfuse::cuda {
namespace {

template <class T>
struct LstmBackwardCell {
  static constexpr int kGates = 4;

  RecurrentBackward<T> backward;
  const T* grad_cell;  // or null
  const T* initial_c;
  const T* cell;
  T* grad_initial_c;
  float* grad_cells;  // workspace (N, H): what comes from the step behind

  LstmBackwardCell(const LstmRecurrenceBackwardArgs& args, Workspace& workspace)
      : backward(args, kGates, workspace),
        grad_cell(args.grad_cell ? args.grad_cell->Data<T>() : nullptr),
        initial_c(args.initial_c.Data<T>()),
        cell(args.cell.Data<T>()),
        grad_initial_c(args.grad_initial_c.MutableData<T>()),
        grad_cells(workspace.Array<float>(backward.layer.items * backward.layer.units)) {}

  __device__ void Step(int64_t t, int64_t item, int64_t unit, float from_later, float* grads) const {
    const Recurrence& layer = backward.layer;
    const int64_t units = layer.units;
    const int64_t row = layer.Row(t, item);
    const int64_t place = row * units + unit;
    const bool is_last = t == layer.steps - 1;
    const T* gates = backward.gates + row * kGates * units + unit;
    const float input_gate = Widen(gates[0]);
    const float forget_gate = Widen(gates[units]);
    const float new_cell = Widen(gates[2 * units]);
    const float output_gate = Widen(gates[3 * units]);
    const float before = Widen(t == 0 ? initial_c[item * units + unit] : cell[layer.Row(t - 1, item) * units + unit]);
    const float shown = tanhf(Widen(cell[place]));
    float& grad_cell_later = grad_cells[item * units + unit];
    float grad = Widen(backward.grad_hidden[place]);
    if (!is_last) grad += from_later;
    float grad_of_cell = grad * output_gate * (1 - shown * shown);
    if (!is_last) grad_of_cell += grad_cell_later;
    if (grad_cell != nullptr) grad_of_cell += Widen(grad_cell[place]);
    const float of_gates[kGates] = {
        grad_of_cell * new_cell * (input_gate * (1 - input_gate)),
        grad_of_cell * before * (forget_gate * (1 - forget_gate)),
        grad_of_cell * input_gate * (1 - new_cell * new_cell),
        grad * shown * (output_gate * (1 - output_gate)),
    };
    for (int gate = 0; gate < kGates; ++gate) {
      grads[gate * units] = of_gates[gate];
      backward.grad_input[(row * kGates + gate) * units + unit] = Narrow<T>(of_gates[gate]);
    }
    grad_cell_later = grad_of_cell * forget_gate;
  }

  __device__ void End(int64_t item, int64_t unit, float from_later) const {
    const int64_t place = item * backward.layer.units + unit;
    backward.grad_initial_h[place] = Narrow<T>(from_later);
    grad_initial_c[place] = Narrow<T>(backward.layer.steps == 0 ? 0.0F : grad_cells[place]);
  }
};

}  // namespace

int64_t WorkspaceBytes(const LstmRecurrenceBackwardArgs& args) { return BytesOf<LstmBackwardCell>(args); }

Status Run(const LstmRecurrenceBackwardArgs& args, const Queue& queue) {
  return RunBackward<LstmBackwardCell>(args, queue);
}

}  // namespace gradfuse::cuda
