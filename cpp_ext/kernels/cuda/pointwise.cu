#include <memory>

#include "gradfuse/loops.h"
#include "gradfuse/ops/pointwise.h"
#include "kernels/cuda/device.cuh"
#include "kernels/dropout.h"
#include "kernels/pointwise_program.h"

namespace gradfuse::cuda {
namespace {

using Op = PointwiseOp;

constexpr int kInputs = PointwiseArgs::kInputs;
constexpr int kOutputs = PointwiseArgs::kOutputs;
constexpr int kThreads = 128;
// Elements that a thread takes through the program side by side.
constexpr int kUnroll = 4;

template <class T>
struct Params {
  PointwiseProgram program;
  const T* inputs[kInputs];
  T* outputs[kOutputs];
  int64_t total;
  // The broadcast, for inputs that are not of the shape of x0.
  bool is_mapped[kInputs];
  Loops<kInputs> loops;
  Divisor divisors[kMaxRank];  // of the loops' sizes
  // Of the dropout.
  const int64_t* seed;
  const int64_t* drawn;
  int64_t threshold;
  int64_t draw;
};

// Truth values are 0 and 1.
__device__ inline float Apply(Op op, float a, float b, float c) {
  switch (op) {
    case Op::kAbs: return fabsf(a);
    case Op::kNeg: return -a;
    case Op::kReciprocal: return 1 / a;
    case Op::kSqrt: return sqrtf(a);
    case Op::kExp: return expf(a);
    case Op::kLog: return logf(a);
    case Op::kErf: return erff(a);
    case Op::kTanh: return tanhf(a);
    case Op::kSigmoid: return 1 / (1 + expf(-a));
    case Op::kRelu: return a <= 0 ? 0.f : a;
    case Op::kAdd: return a + b;
    case Op::kSub: return a - b;
    case Op::kMul: return a * b;
    case Op::kDiv: return a / b;
    case Op::kMax: return a < b || b != b ? b : a;
    case Op::kMin: return b < a || b != b ? b : a;
    case Op::kEqual: return a == b ? 1.f : 0.f;
    case Op::kLess: return a < b ? 1.f : 0.f;
    case Op::kLessOrEqual: return a <= b ? 1.f : 0.f;
    case Op::kGreater: return a > b ? 1.f : 0.f;
    case Op::kGreaterOrEqual: return a >= b ? 1.f : 0.f;
    case Op::kNot: return 1 - a;
    case Op::kAnd: return a * b;
    case Op::kOr: return a + b > 0 ? 1.f : 0.f;
    case Op::kWhere: return a != 0 ? b : c;
    case Op::kKept: break;  // of places, not of numbers
  }
  return 0;
}

template <class T>
__device__ int64_t OffsetAt(const Params<T>& params, int input, int64_t index) {
  if (!params.is_mapped[input]) return index;
  int64_t offset = 0;
  for (int axis = params.loops.rank - 1; axis >= 0; --axis) {
    int64_t position;
    params.divisors[axis].Divide(index, index, position);
    offset += position * params.loops.strides[axis][input];
  }
  return offset;
}

// All threads run one instruction after the other; a thread's registers are in shared memory, where their number may be
// anything, and neighbours are in neighbouring banks.
template <class T>
__global__ void __launch_bounds__(kThreads) Evaluate(const __grid_constant__ Params<T> params) {
  constexpr int64_t kTile = int64_t{kThreads} * kUnroll;
  GRADFUSE_SHARED(float, registers, PointwiseProgram::kMostRegisters * kUnroll * kThreads);
  const PointwiseProgram& program = params.program;
  const auto at = [&](int number, int k) -> float& {
    return registers[(number * kUnroll + k) * kThreads + static_cast<int>(threadIdx.x)];
  };
  for (int64_t tile = blockIdx.x; tile * kTile < params.total; tile += gridDim.x) {
    const auto place = [&](int k) { return tile * kTile + k * kThreads + threadIdx.x; };
    const auto value_of = [&](const PointwiseOperand& operand, int k) -> float {
      if (operand.kind == PointwiseOperand::Kind::kRegister) return at(operand.index, k);
      if (operand.kind == PointwiseOperand::Kind::kConstant) return program.constants[operand.index];
      return Widen(params.inputs[operand.index][OffsetAt(params, operand.index, place(k))]);
    };
    for (int32_t index = 0; index < program.instruction_count; ++index) {
      const PointwiseInstruction& instruction = program.instructions[index];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (place(k) >= params.total) break;
        float result;
        if (instruction.op == Op::kKept) {
          const int64_t number = params.draw + (params.drawn == nullptr ? 0 : *params.drawn);
          const Dropout dropout(params.threshold, *params.seed, number);
          result = dropout.Keeps(static_cast<uint32_t>(place(k))) ? 1.f : 0.f;
        } else {
          float operands[3] = {};
          for (int i = 0; i < instruction.operand_count; ++i) operands[i] = value_of(instruction.operands[i], k);
          result = Apply(instruction.op, operands[0], operands[1], operands[2]);
        }
        at(instruction.result, k) = result;
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (place(k) >= params.total) break;
      for (int output = 0; output < kOutputs; ++output) {
        if (!program.assigns[output]) continue;
        params.outputs[output][place(k)] = Narrow<T>(value_of(program.outputs[output], k));
      }
    }
  }
}

template <class T>
Status RunTyped(const PointwiseArgs& args, const PointwiseProgram& program, const Queue& queue) {
  Params<T> params{};
  params.program = program;
  params.total = args.x0.NumElements();
  const TensorLayout* layouts[kInputs];
  for (int index = 0; index < kInputs; ++index) {
    const Tensor* const input = args.Input(index);
    layouts[index] = input == nullptr ? &args.x0 : input;
    params.inputs[index] = input == nullptr ? nullptr : input->Data<T>();
    params.is_mapped[index] = layouts[index]->NumElements() != params.total;
  }
  for (int output = 0; output < kOutputs; ++output) {
    if (program.assigns[output]) params.outputs[output] = args.y[output].MutableData<T>();
  }
  const auto& [x0, x1, x2, x3, x4, x5, x6, x7] = layouts;
  params.loops = Loops<kInputs>(args.x0.shape, {x0, x1, x2, x3, x4, x5, x6, x7});
  for (int axis = 0; axis < params.loops.rank; ++axis) params.divisors[axis] = Divisor(params.loops.sizes[axis]);
  if (program.draws()) {
    params.seed = args.seed->Data<int64_t>();
    params.drawn = args.drawn ? args.drawn->Data<int64_t>() : nullptr;
    params.threshold = args.dropout_threshold;
    params.draw = args.draw;
  }
  return Launch(queue, Evaluate<T>, CeilDiv(params.total, int64_t{kThreads} * kUnroll), kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const PointwiseArgs&) { return 0; }

Status Run(const PointwiseArgs& args, const Queue& queue) {
  std::shared_ptr<const PointwiseProgram> program;
  GRADFUSE_RETURN_IF_ERROR(FindProgram(args.expression, program));
  return WithShortFloatType(args.x0.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, *program, queue); });
}

}  // namespace gradfuse::cuda
