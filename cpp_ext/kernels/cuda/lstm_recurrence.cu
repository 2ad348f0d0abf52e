#include "gradfuse/ops/lstm_recurrence.h"
#include "kernels/cuda/recurrence.cuh"

namespace gradfuse::cuda {
namespace {

template <class T>
struct Params {
  Recurrence layer;
  const T* input;
  const T* initial_h;
  const T* initial_c;
  const T* weight;
  const T* bias;  // or null
  T* hidden;
  T* cell;
  T* gates;
  // Workspace.
  float* turned;  // (H, 4 H)
  float* h;       // (N, 2, H): of a step and the one before
  float* c;       // (N, H)
};

template <class T>
__global__ void __launch_bounds__(kRecurrenceThreads) RunSteps(const __grid_constant__ Params<T> params) {
  const Recurrence& layer = params.layer;
  const int64_t units = layer.units;
  for (int64_t item = blockIdx.x; item < layer.items; item += gridDim.x) {
    float* states[2] = {params.h + 2 * item * units, params.h + (2 * item + 1) * units};
    float* cells = params.c + item * units;
    for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
      states[0][unit] = Widen(params.initial_h[item * units + unit]);
      cells[unit] = Widen(params.initial_c[item * units + unit]);
    }
    for (int64_t t = 0; t < layer.steps; ++t) {
      Barrier();
      const int64_t row = layer.Row(t, item);
      for (int64_t unit = threadIdx.x; unit < units; unit += kRecurrenceThreads) {
        float sums[4];
        MultiplyState<4>(states[t % 2], params.turned, units, unit, sums);
        for (int gate = 0; gate < 4; ++gate) {
          const float bias = params.bias != nullptr ? Widen(params.bias[gate * units + unit]) : 0.0F;
          const float sum = Widen(params.input[(4 * row + gate) * units + unit]) + bias + sums[gate];
          sums[gate] = gate == 2 ? tanhf(sum) : SigmoidOf(sum);
          params.gates[(4 * row + gate) * units + unit] = Narrow<T>(sums[gate]);
        }
        const float cell = sums[1] * cells[unit] + sums[0] * sums[2];
        const float hidden = sums[3] * tanhf(cell);
        cells[unit] = cell;
        states[(t + 1) % 2][unit] = hidden;
        params.cell[row * units + unit] = Narrow<T>(cell);
        params.hidden[row * units + unit] = Narrow<T>(hidden);
      }
    }
    Barrier();
  }
}

template <class T>
void Place(Workspace& workspace, Params<T>& params) {
  const Recurrence& layer = params.layer;
  params.turned = workspace.Array<float>(4 * layer.units * layer.units);
  params.h = workspace.Array<float>(2 * layer.items * layer.units);
  params.c = workspace.Array<float>(layer.items * layer.units);
}

template <class T>
Params<T> ParamsOf(const LstmRecurrenceArgs& args) {
  Params<T> params{};
  params.layer = Recurrence(RecurrenceSizes(args.input.shape, 4), args.reverse != 0);
  return params;
}

template <class T>
Status RunTyped(const LstmRecurrenceArgs& args, const Queue& queue) {
  Params<T> params = ParamsOf<T>(args);
  const Recurrence& layer = params.layer;
  params.input = args.input.Data<T>();
  params.initial_h = args.initial_h.Data<T>();
  params.initial_c = args.initial_c.Data<T>();
  params.weight = args.weight.Data<T>();
  params.bias = args.bias ? args.bias->Data<T>() : nullptr;
  params.hidden = args.hidden.MutableData<T>();
  params.cell = args.cell.MutableData<T>();
  params.gates = args.gates.MutableData<T>();
  Workspace workspace(queue.workspace);
  Place(workspace, params);
  const int64_t rows = 4 * layer.units;
  GRADFUSE_RETURN_IF_ERROR(Launch(queue, TurnWeight<T>, CeilDiv(rows * layer.units, kRecurrenceThreads),
                                  kRecurrenceThreads, params.weight, rows, layer.units, params.turned));
  return Launch(queue, RunSteps<T>, layer.items, kRecurrenceThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const LstmRecurrenceArgs& args) {
  return WithShortFloatType(args.input.dtype, [&](auto type) {
    auto params = ParamsOf<decltype(type)>(args);
    Workspace workspace(nullptr);
    Place(workspace, params);
    return workspace.bytes();
  });
}

Status Run(const LstmRecurrenceArgs& args, const Queue& queue) {
  return WithShortFloatType(args.input.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
