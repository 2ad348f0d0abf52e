#include "gradfuse/ops/gru_recurrence_backward.h"
#include "kernels/cuda/recurrence.cuh"

namespace gradfuse::cuda {
namespace {

template <class T>
struct Params {
  Recurrence layer;
  const T* grad_hidden;
  const T* initial_h;
  const T* hidden;
  const T* gates;
  const T* weight;
  T* grad_input;
  T* grad_initial_h;
  T* grad_recurrent;
  // Workspace.
  float* grads;       // (N, 2, 3 H): of the recurrent part of a step and the one behind it
  float* grads_kept;  // (N, H): what comes from the step behind, past its gates
};

template <class T>
__global__ void __launch_bounds__(kRecurrenceThreads) RunSteps(const __grid_constant__ Params<T> params) {
  const Recurrence& layer = params.layer;
  const int64_t units = layer.units;
  const int64_t rows = 3 * units;
  for (int64_t item = blockIdx.x; item < layer.items; item += gridDim.x) {
    float* grads[2] = {params.grads + 2 * item * rows, params.grads + (2 * item + 1) * rows};
    float* grads_kept = params.grads_kept + item * units;
    for (int64_t t = layer.steps - 1; t >= 0; --t) {
      Barrier();
      const int64_t row = layer.Row(t, item);
      for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
        const T* gates = params.gates + 4 * row * units + unit;
        const float reset = Widen(gates[0]);
        const float update = Widen(gates[units]);
        const float new_state = Widen(gates[2 * units]);
        const float before = Widen(t == 0 ? params.initial_h[item * units + unit]
                                          : params.hidden[layer.Row(t - 1, item) * units + unit]);
        float grad = Widen(params.grad_hidden[row * units + unit]);
        if (t != layer.steps - 1) {
          grad += grads_kept[unit] + MultiplyGradients(grads[(t + 1) % 2], params.weight, rows, units, unit);
        }
        const float grad_new = grad * (1 - update) * (1 - new_state * new_state);
        const float grad_reset = grad_new * Widen(gates[3 * units]) * (reset * (1 - reset));
        const float grad_update = grad * (before - new_state) * (update * (1 - update));
        const float of_input[3] = {grad_reset, grad_update, grad_new};
        const float of_state[3] = {grad_reset, grad_update, grad_new * reset};
        for (int gate = 0; gate < 3; ++gate) {
          const int64_t place = row * rows + gate * units + unit;
          grads[t % 2][gate * units + unit] = of_state[gate];
          params.grad_input[place] = Narrow<T>(of_input[gate]);
          params.grad_recurrent[place] = Narrow<T>(of_state[gate]);
        }
        grads_kept[unit] = grad * update;
      }
    }
    Barrier();
    for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
      float grad = 0;
      if (layer.steps > 0) {
        grad = grads_kept[unit] + MultiplyGradients(grads[0], params.weight, rows, units, unit);
      }
      params.grad_initial_h[item * units + unit] = Narrow<T>(grad);
    }
  }
}

template <class T>
void Place(Workspace& workspace, Params<T>& params) {
  const Recurrence& layer = params.layer;
  params.grads = workspace.Array<float>(6 * layer.items * layer.units);
  params.grads_kept = workspace.Array<float>(layer.items * layer.units);
}

template <class T>
Params<T> ParamsOf(const GruRecurrenceBackwardArgs& args) {
  Params<T> params{};
  params.layer = Recurrence(RecurrenceSizes(args.grad_hidden.shape, 1), args.reverse != 0);
  return params;
}

template <class T>
Status RunTyped(const GruRecurrenceBackwardArgs& args, const Queue& queue) {
  Params<T> params = ParamsOf<T>(args);
  params.grad_hidden = args.grad_hidden.Data<T>();
  params.initial_h = args.initial_h.Data<T>();
  params.hidden = args.hidden.Data<T>();
  params.gates = args.gates.Data<T>();
  params.weight = args.weight.Data<T>();
  params.grad_input = args.grad_input.MutableData<T>();
  params.grad_initial_h = args.grad_initial_h.MutableData<T>();
  params.grad_recurrent = args.grad_recurrent.MutableData<T>();
  Workspace workspace(queue.workspace);
  Place(workspace, params);
  return Launch(queue, RunSteps<T>, params.layer.items, kRecurrenceThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const GruRecurrenceBackwardArgs& args) {
  return WithShortFloatType(args.grad_hidden.dtype, [&](auto type) {
    auto params = ParamsOf<decltype(type)>(args);
    Workspace workspace(nullptr);
    Place(workspace, params);
    return workspace.bytes();
  });
}

Status Run(const GruRecurrenceBackwardArgs& args, const Queue& queue) {
  return WithShortFloatType(args.grad_hidden.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
