#include "gradfuse/ops/gru_recurrence.h"
#include "kernels/cuda/recurrence.cuh"

namespace gradfuse::cuda {
namespace {

template <class T>
struct Params {
  Recurrence layer;
  const T* input;
  const T* initial_h;
  const T* weight;
  const T* bias;  // or null
  T* hidden;
  T* gates;
  // Workspace.
  float* turned;  // (H, 3 H)
  float* h;       // (N, 2, H): of a step and the one before
};

template <class T>
__global__ void __launch_bounds__(kRecurrenceThreads) RunSteps(const __grid_constant__ Params<T> params) {
  const Recurrence& layer = params.layer;
  const int64_t units = layer.units;
  for (int64_t item = blockIdx.x; item < layer.items; item += gridDim.x) {
    float* states[2] = {params.h + 2 * item * units, params.h + (2 * item + 1) * units};
    for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
      states[0][unit] = Widen(params.initial_h[item * units + unit]);
    }
    for (int64_t t = 0; t < layer.steps; ++t) {
      Barrier();
      const int64_t row = layer.Row(t, item);
      for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
        float sums[3];
        MultiplyState<3>(states[t % 2], params.turned, units, unit, sums);
        float inputs[3];
        for (int gate = 0; gate < 3; ++gate) {
          inputs[gate] = Widen(params.input[(3 * row + gate) * units + unit]);
          if (params.bias != nullptr) sums[gate] += Widen(params.bias[gate * units + unit]);
        }
        const float reset = SigmoidOf(inputs[0] + sums[0]);
        const float update = SigmoidOf(inputs[1] + sums[1]);
        const float new_state = tanhf(inputs[2] + reset * sums[2]);
        const float hidden = new_state + update * (states[t % 2][unit] - new_state);
        const float gates[4] = {reset, update, new_state, sums[2]};
        for (int gate = 0; gate < 4; ++gate) {
          params.gates[(4 * row + gate) * units + unit] = Narrow<T>(gates[gate]);
        }
        states[(t + 1) % 2][unit] = hidden;
        params.hidden[row * units + unit] = Narrow<T>(hidden);
      }
    }
    Barrier();
  }
}

template <class T>
void Place(Workspace& workspace, Params<T>& params) {
  const Recurrence& layer = params.layer;
  params.turned = workspace.Array<float>(3 * layer.units * layer.units);
  params.h = workspace.Array<float>(2 * layer.items * layer.units);
}

template <class T>
Params<T> ParamsOf(const GruRecurrenceArgs& args) {
  Params<T> params{};
  params.layer = Recurrence(RecurrenceSizes(args.input.shape, 3), args.reverse != 0);
  return params;
}

template <class T>
Status RunTyped(const GruRecurrenceArgs& args, const Queue& queue) {
  Params<T> params = ParamsOf<T>(args);
  const Recurrence& layer = params.layer;
  params.input = args.input.Data<T>();
  params.initial_h = args.initial_h.Data<T>();
  params.weight = args.weight.Data<T>();
  params.bias = args.bias ? args.bias->Data<T>() : nullptr;
  params.hidden = args.hidden.MutableData<T>();
  params.gates = args.gates.MutableData<T>();
  Workspace workspace(queue.workspace);
  Place(workspace, params);
  const int64_t rows = 3 * layer.units;
  GRADFUSE_RETURN_IF_ERROR(Launch(queue, TurnWeight<T>, CeilDiv(rows * layer.units, kRecurrenceThreads),
                                  kRecurrenceThreads, params.weight, rows, layer.units, params.turned));
  return Launch(queue, RunSteps<T>, layer.items, kRecurrenceThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const GruRecurrenceArgs& args) {
  return WithShortFloatType(args.input.dtype, [&](auto type) {
    auto params = ParamsOf<decltype(type)>(args);
    Workspace workspace(nullptr);
    Place(workspace, params);
    return workspace.bytes();
  });
}

Status Run(const GruRecurrenceArgs& args, const Queue& queue) {
  return WithShortFloatType(args.input.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
