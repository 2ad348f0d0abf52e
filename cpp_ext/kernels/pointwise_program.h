#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gradfuse/ops/pointwise.h"
#include "gradfuse/status.h"

// The expression of Pointwise as kernels run it.
namespace gradfuse {

enum class PointwiseOp : uint8_t {
  kAbs,
  kNeg,
  kReciprocal,
  kSqrt,
  kExp,
  kLog,
  kErf,
  kTanh,
  kSigmoid,
  kRelu,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMax,
  kMin,
  kEqual,
  kLess,
  kLessOrEqual,
  kGreater,
  kGreaterOrEqual,
  kNot,
  kAnd,
  kOr,
  kWhere,
  kKept
};

struct PointwiseOperand {
  enum class Kind : uint8_t { kRegister, kInput, kConstant };

  Kind kind;
  uint8_t index;
};

// Sets the register `result`, which may be one of the operands.
struct PointwiseInstruction {
  PointwiseOp op;
  uint8_t result;
  uint8_t operand_count;
  PointwiseOperand operands[3];
};

// A plain value, so that a kernel for CUDA takes it as a parameter.
struct PointwiseProgram {
  static constexpr int kMostInstructions = 64;
  static constexpr int kMostRegisters = 16;
  // Two numbers of each operator, and one of each output.
  static constexpr int kMostConstants = 2 * kMostInstructions + PointwiseArgs::kOutputs;

  bool draws() const;

  int32_t instruction_count = 0;
  int32_t register_count = 0;
  int32_t constant_count = 0;
  PointwiseInstruction instructions[kMostInstructions] = {};
  float constants[kMostConstants] = {};
  PointwiseOperand outputs[PointwiseArgs::kOutputs] = {};
  bool assigns[PointwiseArgs::kOutputs] = {};  // which outputs
  bool reads[PointwiseArgs::kInputs] = {};     // which inputs
};

// The program of an expression, or a refusal of the argument `expression`. Programs are kept, and found again by the
// text.
Status FindProgram(const std::string& expression, std::shared_ptr<const PointwiseProgram>& program);

}  // namespace gradfuse
