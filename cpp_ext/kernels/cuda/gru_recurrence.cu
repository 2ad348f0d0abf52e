#include "gradfuse/ops/gru_recurrence.h"
#include "kernels/cuda/recurrence.cuh"

namespace gradfuse::cuda {
namespace {

template <class T>
struct GruCell {
  static constexpr int kGates = 3;

  RecurrentForward<T> forward;

  GruCell(const GruRecurrenceArgs& args, Workspace& workspace) : forward(args, kGates, workspace) {}

  __device__ void Begin(int64_t, int64_t) const {}

  __device__ float Step(int64_t, int64_t row, int64_t unit, float before, float* sums) const {
    const int64_t units = forward.layer.units;
    float inputs[kGates];
    for (int gate = 0; gate < kGates; ++gate) {
      inputs[gate] = Widen(forward.input[(kGates * row + gate) * units + unit]);
      if (forward.bias != nullptr) sums[gate] += Widen(forward.bias[gate * units + unit]);
    }
    const float reset = SigmoidOf(inputs[0] + sums[0]);
    const float update = SigmoidOf(inputs[1] + sums[1]);
    const float new_state = tanhf(inputs[2] + reset * sums[2]);
    const float gates[4] = {reset, update, new_state, sums[2]};
    for (int gate = 0; gate < 4; ++gate) forward.gates[(4 * row + gate) * units + unit] = Narrow<T>(gates[gate]);
    return new_state + update * (before - new_state);
  }
};

}  // namespace

int64_t WorkspaceBytes(const GruRecurrenceArgs& args) { return BytesOf<GruCell>(args); }

Status Run(const GruRecurrenceArgs& args, const Queue& queue) { return RunForward<GruCell>(args, queue); }

}  // namespace gradfuse::cuda
