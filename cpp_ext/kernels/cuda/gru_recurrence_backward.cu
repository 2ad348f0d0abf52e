#include "gradfuse/ops/gru_recurrence_backward.h"
#include "kernels/cuda/recurrence.cuh"

namespace gradfuse::cuda {
namespace {

template <class T>
struct GruBackwardCell {
  static constexpr int kGates = 3;

  RecurrentBackward<T> backward;
  const T* initial_h;
  const T* hidden;
  T* grad_recurrent;
  float* grads_kept;  // workspace (N, H): what comes from the step behind, past its gates

  GruBackwardCell(const GruRecurrenceBackwardArgs& args, Workspace& workspace)
      : backward(args, kGates, workspace),
        initial_h(args.initial_h.Data<T>()),
        hidden(args.hidden.Data<T>()),
        grad_recurrent(args.grad_recurrent.MutableData<T>()),
        grads_kept(workspace.Array<float>(backward.layer.items * backward.layer.units)) {}

  __device__ void Step(int64_t t, int64_t item, int64_t unit, float from_later, float* grads) const {
    const Recurrence& layer = backward.layer;
    const int64_t units = layer.units;
    const int64_t row = layer.Row(t, item);
    const T* gates = backward.gates + 4 * row * units + unit;
    const float reset = Widen(gates[0]);
    const float update = Widen(gates[units]);
    const float new_state = Widen(gates[2 * units]);
    const float before = Widen(t == 0 ? initial_h[item * units + unit] : hidden[layer.Row(t - 1, item) * units + unit]);
    float& kept = grads_kept[item * units + unit];
    float grad = Widen(backward.grad_hidden[row * units + unit]);
    if (t != layer.steps - 1) grad += kept + from_later;
    const float grad_new = grad * (1 - update) * (1 - new_state * new_state);
    const float grad_reset = grad_new * Widen(gates[3 * units]) * (reset * (1 - reset));
    const float grad_update = grad * (before - new_state) * (update * (1 - update));
    const float of_input[kGates] = {grad_reset, grad_update, grad_new};
    const float of_state[kGates] = {grad_reset, grad_update, grad_new * reset};
    for (int gate = 0; gate < kGates; ++gate) {
      const int64_t place = (row * kGates + gate) * units + unit;
      grads[gate * units] = of_state[gate];
      backward.grad_input[place] = Narrow<T>(of_input[gate]);
      grad_recurrent[place] = Narrow<T>(of_state[gate]);
    }
    kept = grad * update;
  }

  __device__ void End(int64_t item, int64_t unit, float from_later) const {
    const int64_t place = item * backward.layer.units + unit;
    const float grad = backward.layer.steps == 0 ? 0.0F : grads_kept[place] + from_later;
    backward.grad_initial_h[place] = Narrow<T>(grad);
  }
};

}  // namespace

int64_t WorkspaceBytes(const GruRecurrenceBackwardArgs& args) { return BytesOf<GruBackwardCell>(args); }

Status Run(const GruRecurrenceBackwardArgs& args, const Queue& queue) {
  return RunBackward<GruBackwardCell>(args, queue);
}

}  // namespace gradfuse::cuda
