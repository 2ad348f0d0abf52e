#include "gradfuse/ops/pointwise.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "gradfuse/loops.h"
#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"
#include "kernels/dropout.h"
#include "kernels/pointwise_program.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/pointwise.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vector_math-inl.h"

// A program runs over a block of elements at a time: each instruction is a loop over the block, whose results are in
// the first-level cache when the next one reads them.

// What the loops of all instruction sets share.
#ifndef GRADFUSE_POINTWISE_SHARED
#define GRADFUSE_POINTWISE_SHARED
namespace gradfuse::cpu {
namespace {

using Op = PointwiseOp;

constexpr int kInputs = PointwiseArgs::kInputs;
constexpr int kOutputs = PointwiseArgs::kOutputs;
constexpr int64_t kMostLanes = 16;
constexpr int64_t kLine = 64 / sizeof(float);
// Loops take up to so many vectors at a time, beyond the end of a block where it is no multiple of them: rows have room
// for that, as they are of whole blocks of the widest vectors.
constexpr int kMostUnroll = 4;
constexpr int64_t kWholeBlock = kMostUnroll * kMostLanes;

// Registers and inputs that are not read in place have a row each in 24 KiB, of 32 that the first-level cache has at
// least: the rest is for inputs and outputs that pass. Rows of more than 4 KiB gain nothing; even those of 1 KiB, which
// the largest programs have, are long beside the choice of a loop.
constexpr int64_t kRowsFloats = 6144;
constexpr int64_t kLongestRow = 1024;
constexpr int64_t kMostRows = PointwiseProgram::kMostRegisters + kInputs;
static_assert(kRowsFloats / kMostRows >= kWholeBlock && kLongestRow % kWholeBlock == 0);
// What is read is copied to rows by whole vectors, which begin anywhere.
constexpr int64_t kRowsMemory = kRowsFloats + kMostRows * kMostLanes;

template <class T>
struct Source {
  const T* data = nullptr;
  int64_t elements = 0;
  Loops<1> loops;  // over the shape of x0
};

template <class T>
struct Plan {
  const PointwiseProgram* program = nullptr;
  Source<T> inputs[kInputs];
  T* outputs[kOutputs] = {};
  Dropout dropout{0, 0, 0};  // without one, all is kept
  bool ends_in_y0 = false;   // the only output, and the result of the last instruction
  int64_t rows = 0;
  int64_t block = 0;  // elements of each row
  // A vector of each constant, and one of each input of a single element.
  std::vector<float> constants;
  std::vector<float> single[kInputs];
};

// Numbers of a block: neighbours, or with step 0 a vector that holds for all of it.
struct Values {
  const float* first = nullptr;
  int64_t step = 1;
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

using Floats = hn::ScalableTag<float>;
using Vector = hn::Vec<Floats>;

// The vectors of an operand, one after the other.
class Cursor {
 public:
  explicit Cursor(const Values& values)
      : next_(values.first), step_(values.step * static_cast<int64_t>(hn::Lanes(Floats()))) {}

  GRADFUSE_INLINE Vector Next() {
    const auto vector = hn::LoadU(Floats(), next_);
    next_ += step_;
    return vector;
  }

 private:
  const float* next_;
  int64_t step_;
};

static_assert(hn::MaxLanes(Floats()) <= kMostLanes);
int64_t MostAtOnce() { return static_cast<int64_t>(kMostUnroll * hn::Lanes(Floats())); }

template <int kUnroll, bool kStreams, class Function, class... Operands>
GRADFUSE_INLINE void Map(int64_t count, float* out, const Function& function, Operands... operands) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += kUnroll * lanes) {
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k)
      Sink<kStreams, Whole>().StoreBits(function(operands.Next()...), d, out + i + k * lanes);
  }
}

// Truth values are kept as the bits of floats, all 1 or all 0.
using Bits = hn::RebindToUnsigned<Floats>;
GRADFUSE_INLINE hn::Vec<Bits> BitsOf(Vector value) { return hn::BitCast(Bits(), value); }
GRADFUSE_INLINE Vector FromBits(hn::Vec<Bits> bits) { return hn::BitCast(Floats(), bits); }
GRADFUSE_INLINE Vector FromMask(Mask<Floats> mask) {
  const Bits u;
  return FromBits(hn::IfThenElse(hn::RebindMask(u, mask), hn::Set(u, ~uint32_t{0}), hn::Zero(u)));
}
GRADFUSE_INLINE Mask<Floats> ToMask(Vector truth) {
  return hn::RebindMask(Floats(), BitsOf(truth) != hn::Zero(Bits()));
}

void SetKept(const Dropout& dropout, int64_t begin, int64_t count, float* out) {
  uint32_t kept[kMostLanes];
  for (int64_t i = 0; i < count; i += kMostLanes) {
    for (int64_t k = 0; k < kMostLanes; ++k) kept[k] = dropout.Keeps(static_cast<uint32_t>(begin + i + k)) ? ~0u : 0u;
    std::memcpy(out + i, kept, sizeof kept);
  }
}

template <bool kStreams>
void Execute(Op op, const Values (&operands)[3], int64_t count, float* out) {
  const Floats d;
  const auto& [a, b, c] = operands;
  const auto few = [&](const auto& function) HWY_ATTR { Map<kMostUnroll, kStreams>(count, out, function, Cursor(a)); };
  const auto map = [&](const auto& function) HWY_ATTR { Map<1, kStreams>(count, out, function, Cursor(a)); };
  const auto map2 = [&](const auto& function)
                        HWY_ATTR { Map<kMostUnroll, kStreams>(count, out, function, Cursor(a), Cursor(b)); };
  switch (op) {
    case Op::kAbs: return few([](Vector x) HWY_ATTR { return hn::Abs(x); });
    case Op::kNeg: return few([](Vector x) HWY_ATTR { return FromBits(BitsOf(x) ^ hn::Set(Bits(), 0x80000000u)); });
    case Op::kReciprocal: return map([&](Vector x) HWY_ATTR { return hn::Set(d, 1.0f) / x; });
    case Op::kSqrt: return map([](Vector x) HWY_ATTR { return hn::Sqrt(x); });
    case Op::kExp:
      // Exp leaves what is below 2^-125 to loops that flush subnormals.
      return map([&](Vector x) HWY_ATTR { return hn::IfThenZeroElse(x < hn::Set(d, -86.6434f), Exp<float>(d, x)); });
    case Op::kLog: return map([&](Vector x) HWY_ATTR { return Log(d, x); });
    case Op::kErf: return map([&](Vector x) HWY_ATTR { return Erf(d, x); });
    case Op::kTanh: return map([&](Vector x) HWY_ATTR { return Tanh(d, x); });
    case Op::kSigmoid:
      // 0 where the exponential's inverse is, as of -infinity.
      return map([&](Vector x) HWY_ATTR { return hn::IfThenZeroElse(x < hn::Set(d, -87.0f), Sigmoid(d, x)); });
    case Op::kRelu: return few([&](Vector x) HWY_ATTR { return hn::IfThenZeroElse(x <= hn::Zero(d), x); });
    case Op::kAdd: return map2([](Vector x, Vector y) HWY_ATTR { return x + y; });
    case Op::kSub: return map2([](Vector x, Vector y) HWY_ATTR { return x - y; });
    case Op::kMul: return map2([](Vector x, Vector y) HWY_ATTR { return x * y; });
    case Op::kDiv: return map2([](Vector x, Vector y) HWY_ATTR { return x / y; });
    case Op::kMax:
      return map2([](Vector x, Vector y) HWY_ATTR { return hn::IfThenElse(hn::Or(x < y, hn::IsNaN(y)), y, x); });
    case Op::kMin:
      return map2([](Vector x, Vector y) HWY_ATTR { return hn::IfThenElse(hn::Or(y < x, hn::IsNaN(y)), y, x); });
    case Op::kEqual: return map2([](Vector x, Vector y) HWY_ATTR { return FromMask(x == y); });
    case Op::kLess: return map2([](Vector x, Vector y) HWY_ATTR { return FromMask(x < y); });
    case Op::kLessOrEqual: return map2([](Vector x, Vector y) HWY_ATTR { return FromMask(x <= y); });
    case Op::kGreater: return map2([](Vector x, Vector y) HWY_ATTR { return FromMask(x > y); });
    case Op::kGreaterOrEqual: return map2([](Vector x, Vector y) HWY_ATTR { return FromMask(x >= y); });
    case Op::kNot: return few([](Vector x) HWY_ATTR { return FromBits(BitsOf(x) ^ hn::Set(Bits(), ~uint32_t{0})); });
    case Op::kAnd: return map2([](Vector x, Vector y) HWY_ATTR { return FromBits(BitsOf(x) & BitsOf(y)); });
    case Op::kOr: return map2([](Vector x, Vector y) HWY_ATTR { return FromBits(BitsOf(x) | BitsOf(y)); });
    case Op::kWhere:
      return Map<kMostUnroll, kStreams>(
          count, out,
          [](Vector condition, Vector yes, Vector no) HWY_ATTR { return hn::IfThenElse(ToMask(condition), yes, no); },
          Cursor(a), Cursor(b), Cursor(c));
    case Op::kKept: return;  // by SetKept
  }
}

// from[0], ..., from[count - 1] to a row. There are `readable` elements from there to the tensor's end.
template <class T>
void CopyRun(const T* from, int64_t count, int64_t readable, float* to) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i < count && i + lanes <= readable; i += lanes) hn::StoreU(Load(Sweep(), d, from + i), d, to + i);
  if (i < count) hn::StoreU(Load(Part{static_cast<size_t>(count - i)}, d, from + i), d, to + i);
}

void RepeatRun(float value, int64_t count, float* to) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto values = hn::Set(d, value);
  for (int64_t i = 0; i < count; i += lanes) hn::StoreU(values, d, to + i);
}

// Elements [begin, begin + count) of an input that is broadcast to the shape of x0: in place, or in a row.
template <class T>
Values Read(const Source<T>& source, int64_t begin, int64_t count, float* row) {
  const auto& loops = source.loops;
  const int inner = loops.inner();
  const int64_t run = loops.sizes[inner];
  int64_t position[kMaxRank] = {};
  int64_t offset = 0;
  for (int axis = inner; axis >= 0; --axis) {
    position[axis] = begin % loops.sizes[axis];
    begin /= loops.sizes[axis];
    offset += position[axis] * loops.strides[axis][0];
  }
  // The input is dense, so that the stride of the innermost loop is 0 or 1.
  const bool repeats = loops.strides[inner][0] == 0;
  if (position[inner] + count <= run) {
    if (repeats) {
      RepeatRun(ToCompute(source.data[offset]), kMostLanes, row);
      return {row, 0};
    }
    if constexpr (std::is_same_v<T, float>) {
      if (count % MostAtOnce() == 0) return {source.data + offset, 1};
    }
  }
  // Runs that repeat as a whole are doubled once there is one.
  const bool is_periodic = inner == 1 && loops.strides[0][0] == 0 && run < count;
  const int64_t end = is_periodic ? run : count;
  for (int64_t at = 0; at < end;) {
    const int64_t part = std::min(end - at, run - position[inner]);
    if (repeats) {
      RepeatRun(ToCompute(source.data[offset]), part, row + at);
    } else {
      CopyRun(source.data + offset, part, source.elements - offset, row + at);
      offset -= position[inner];
    }
    at += part;
    position[inner] = 0;
    for (int axis = inner - 1; axis >= 0; --axis) {
      offset += loops.strides[axis][0];
      if (++position[axis] < loops.sizes[axis]) break;
      offset -= loops.sizes[axis] * loops.strides[axis][0];
      position[axis] = 0;
    }
  }
  for (int64_t filled = end; filled < count; filled *= 2) {
    std::memcpy(row + filled, row, static_cast<size_t>(std::min(filled, count - filled)) * sizeof(float));
  }
  return {row, 1};
}

template <class T, bool kStreams>
void Write(const Values& values, int64_t count, T* to) {
  const Floats d;
  ForEachVectorInto<Sink<kStreams, Whole>>(to, d, count, [&](int64_t i, auto at) HWY_ATTR {
    Store(at, Load(at, d, values.first + i * values.step), d, to + i);
  });
}

// Where the last loop may write y0 itself, and null where that needs Write.
float* Direct(float* to, int64_t count) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(to) % (hn::Lanes(Floats()) * sizeof(float)) == 0;
  return is_aligned && count % MostAtOnce() == 0 ? to : nullptr;
}
template <class T16>
float* Direct(T16*, int64_t) {
  return nullptr;
}

template <class T, bool kStreams>
void Evaluate(const Plan<T>& plan, int64_t begin, int64_t end) {
  const PointwiseProgram& program = *plan.program;
  const int64_t pitch = plan.block + kMostLanes;
  alignas(64) float memory[kRowsMemory];
  // The last of loops over whole vectors reads beyond what there is.
  if ((end - begin) % MostAtOnce() != 0) std::fill_n(memory, plan.rows * pitch, 0.0f);
  float* const input_rows = memory + program.register_count * pitch;
  Values inputs[kInputs];
  const auto values_of = [&](const PointwiseOperand& operand) -> Values {
    switch (operand.kind) {
      case PointwiseOperand::Kind::kRegister: return {memory + operand.index * pitch, 1};
      case PointwiseOperand::Kind::kInput: return inputs[operand.index];
      case PointwiseOperand::Kind::kConstant: break;
    }
    return {plan.constants.data() + operand.index * kMostLanes, 0};
  };
  for (; begin < end; begin += plan.block) {
    const int64_t count = std::min(plan.block, end - begin);
    int64_t row = 0;
    for (int index = 0; index < kInputs; ++index) {
      if (!program.reads[index]) continue;
      if (!plan.single[index].empty()) {
        inputs[index] = {plan.single[index].data(), 0};
        continue;
      }
      float* const own_row = input_rows + row++ * pitch;
      inputs[index] = Read(plan.inputs[index], begin, count, own_row);
      if (inputs[index].first == own_row) continue;
      // Of what is read in place, the next block: the processor does not look beyond a page by itself.
      for (int64_t i = 0; i < plan.block; i += kLine) Prefetch(Floats(), inputs[index].first + plan.block + i);
    }
    float* const direct = plan.ends_in_y0 ? Direct(plan.outputs[0] + begin, count) : nullptr;
    for (int32_t index = 0; index < program.instruction_count; ++index) {
      const PointwiseInstruction& instruction = program.instructions[index];
      float* const out = memory + instruction.result * pitch;
      if (instruction.op == Op::kKept) {
        SetKept(plan.dropout, begin, count, out);
        continue;
      }
      const auto& operands = instruction.operands;
      const Values values[] = {values_of(operands[0]), values_of(operands[1]), values_of(operands[2])};
      if (direct != nullptr && index + 1 == program.instruction_count) {
        Execute<kStreams>(instruction.op, values, count, direct);
      } else {
        Execute<false>(instruction.op, values, count, out);
      }
    }
    if (direct != nullptr) continue;
    // y0, which may lie in the memory of x0, is the last.
    for (int output = kOutputs - 1; output >= 0; --output) {
      if (!program.assigns[output]) continue;
      Write<T, kStreams>(values_of(program.outputs[output]), count, plan.outputs[output] + begin);
    }
  }
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// What an operator costs beside the bytes that are moved, in bytes of each element.
int64_t CostOf(Op op) {
  switch (op) {
    case Op::kExp:
    case Op::kLog:
    case Op::kErf:
    case Op::kTanh:
    case Op::kSigmoid: return 8;
    default: return 1;
  }
}

template <class T>
void RunTyped(const PointwiseArgs& args, const PointwiseProgram& program, const ParallelFor& parallel) {
  const int64_t total = args.x0.NumElements();
  if (total == 0) return;
  Plan<T> plan;
  plan.program = &program;
  for (int32_t index = 0; index < program.constant_count; ++index) {
    plan.constants.insert(plan.constants.end(), kMostLanes, program.constants[index]);
  }
  int64_t bytes = 0;
  plan.rows = program.register_count;
  for (int index = 0; index < kInputs; ++index) {
    if (!program.reads[index]) continue;
    const Tensor& input = *args.Input(index);
    plan.inputs[index] = {input.Data<T>(), input.NumElements(), Loops<1>(args.x0.shape, {&input})};
    if (input.NumElements() == 1) {
      plan.single[index].assign(kMostLanes, ToCompute(*input.Data<T>()));
    } else {
      ++plan.rows;
    }
    bytes += input.NumBytes();
  }
  for (int output = 0; output < kOutputs; ++output) {
    if (!program.assigns[output]) continue;
    plan.outputs[output] = args.y[output].MutableData<T>();
    bytes += args.y[output].NumBytes();
  }
  plan.ends_in_y0 = program.instruction_count > 0 && !program.assigns[1] && !program.assigns[2] &&
                    program.outputs[0].kind == PointwiseOperand::Kind::kRegister &&
                    program.outputs[0].index == program.instructions[program.instruction_count - 1].result;
  if (args.seed) {
    const int64_t drawn = args.drawn ? *args.drawn->Data<int64_t>() : 0;
    plan.dropout = Dropout(args.dropout_threshold, *args.seed->Data<int64_t>(), args.draw + drawn);
  }
  const int64_t longest = kRowsFloats / std::max<int64_t>(plan.rows, 1) / kWholeBlock * kWholeBlock;
  plan.block = std::min({kLongestRow, longest, CeilDiv(total, kWholeBlock) * kWholeBlock});

  const bool streams = bytes >= StreamBytes();
  const auto evaluate = streams ? GRADFUSE_DISPATCH(Evaluate<T, true>) : GRADFUSE_DISPATCH(Evaluate<T, false>);
  int64_t cost = bytes;
  for (int32_t index = 0; index < program.instruction_count; ++index) {
    cost += CostOf(program.instructions[index].op) * total;
  }
  constexpr int64_t kPart = 16384;
  parallel(CeilDiv(total, kPart), cost, [&](int64_t part) {
    const StreamFence fence(streams);
    evaluate(plan, part * kPart, std::min(total, (part + 1) * kPart));
  });
}

}  // namespace

void Run(const PointwiseArgs& args, const ParallelFor& parallel) {
  std::shared_ptr<const PointwiseProgram> program;
  if (!FindProgram(args.expression, program).ok()) return;  // never, of arguments that are checked
  WithShortFloatType(args.x0.dtype, [&](auto type) { RunTyped<decltype(type)>(args, *program, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
