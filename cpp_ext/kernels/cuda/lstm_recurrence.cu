#include "gradfuse/ops/lstm_recurrence.h"
#include "kernels/cuda/recurrence.cuh"

namespace gradfuse::cuda {
namespace {

template <class T>
struct LstmCell {
  static constexpr int kGates = 4;

  RecurrentForward<T> forward;
  const T* initial_c;
  T* cell;
  float* c;  // workspace (N, H)

  LstmCell(const LstmRecurrenceArgs& args, Workspace& workspace)
      : forward(args, kGates, workspace),
        initial_c(args.initial_c.Data<T>()),
        cell(args.cell.MutableData<T>()),
        c(workspace.Array<float>(forward.layer.items * forward.layer.units)) {}

  __device__ void Begin(int64_t item, int64_t unit) const {
    const int64_t place = item * forward.layer.units + unit;
    c[place] = Widen(initial_c[place]);
  }

  __device__ float Step(int64_t item, int64_t row, int64_t unit, float, float* sums) const {
    const int64_t units = forward.layer.units;
    for (int gate = 0; gate < kGates; ++gate) {
      const float bias = forward.bias != nullptr ? Widen(forward.bias[gate * units + unit]) : 0.0F;
      const float sum = Widen(forward.input[(kGates * row + gate) * units + unit]) + bias + sums[gate];
      sums[gate] = gate == 2 ? tanhf(sum) : SigmoidOf(sum);
      forward.gates[(kGates * row + gate) * units + unit] = Narrow<T>(sums[gate]);
    }
    float& now = c[item * units + unit];
    now = sums[1] * now + sums[0] * sums[2];
    cell[row * units + unit] = Narrow<T>(now);
    return sums[3] * tanhf(now);
  }
};

}  // namespace

int64_t WorkspaceBytes(const LstmRecurrenceArgs& args) { return BytesOf<LstmCell>(args); }

Status Run(const LstmRecurrenceArgs& args, const Queue& queue) { return RunForward<LstmCell>(args, queue); }

}  // namespace gradfuse::cuda
