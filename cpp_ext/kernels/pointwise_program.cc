#include "kernels/pointwise_program.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gradfuse/float16.h"
#include "gradfuse/signature.h"

namespace gradfuse {
namespace {

enum class Type : uint8_t { kNumber, kTruth };

struct OperatorInfo {
  const char* name;
  PointwiseOp op;
  Type result;
  uint8_t arity;
  Type arguments[3];
};

constexpr Type kN = Type::kNumber;
constexpr Type kB = Type::kTruth;
constexpr OperatorInfo kOperators[] = {
    {"Abs", PointwiseOp::kAbs, kN, 1, {kN}},
    {"Neg", PointwiseOp::kNeg, kN, 1, {kN}},
    {"Reciprocal", PointwiseOp::kReciprocal, kN, 1, {kN}},
    {"Sqrt", PointwiseOp::kSqrt, kN, 1, {kN}},
    {"Exp", PointwiseOp::kExp, kN, 1, {kN}},
    {"Log", PointwiseOp::kLog, kN, 1, {kN}},
    {"Erf", PointwiseOp::kErf, kN, 1, {kN}},
    {"Tanh", PointwiseOp::kTanh, kN, 1, {kN}},
    {"Sigmoid", PointwiseOp::kSigmoid, kN, 1, {kN}},
    {"Relu", PointwiseOp::kRelu, kN, 1, {kN}},
    {"Add", PointwiseOp::kAdd, kN, 2, {kN, kN}},
    {"Sub", PointwiseOp::kSub, kN, 2, {kN, kN}},
    {"Mul", PointwiseOp::kMul, kN, 2, {kN, kN}},
    {"Div", PointwiseOp::kDiv, kN, 2, {kN, kN}},
    {"Max", PointwiseOp::kMax, kN, 2, {kN, kN}},
    {"Min", PointwiseOp::kMin, kN, 2, {kN, kN}},
    {"Equal", PointwiseOp::kEqual, kB, 2, {kN, kN}},
    {"Less", PointwiseOp::kLess, kB, 2, {kN, kN}},
    {"LessOrEqual", PointwiseOp::kLessOrEqual, kB, 2, {kN, kN}},
    {"Greater", PointwiseOp::kGreater, kB, 2, {kN, kN}},
    {"GreaterOrEqual", PointwiseOp::kGreaterOrEqual, kB, 2, {kN, kN}},
    {"Not", PointwiseOp::kNot, kB, 1, {kB}},
    {"And", PointwiseOp::kAnd, kB, 2, {kB, kB}},
    {"Or", PointwiseOp::kOr, kB, 2, {kB, kB}},
    {"Where", PointwiseOp::kWhere, kN, 3, {kB, kN, kN}},
    {"Kept", PointwiseOp::kKept, kB, 0, {}},
};

// Why an expression is none. It does not leave this file.
class Refusal : public std::exception {
 public:
  Refusal(const std::string& got, const std::string& wanted) : status_(Refuse("expression", got, wanted)) {}

  const Status& status() const { return status_; }

 private:
  Status status_;
};

[[noreturn]] void Fail(const std::string& got, const std::string& wanted) { throw Refusal(got, wanted); }
[[noreturn]] void FailAsTooLong() {
  const std::string most = std::to_string(PointwiseProgram::kMostInstructions);
  Fail("of more than " + most + " operators", "at most " + most);
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsLower(char c) { return c >= 'a' && c <= 'z'; }
bool IsUpper(char c) { return c >= 'A' && c <= 'Z'; }

struct Token {
  enum class Kind : uint8_t { kName, kOperator, kNumber, kSign, kOther, kEnd };

  bool Is(char sign) const { return kind == Kind::kSign && *text == sign; }

  Kind kind;
  const char* text;
  size_t size;
};

// Cuts a text into tokens.
class Lexer {
 public:
  explicit Lexer(const std::string& text) : at_(text.data()), end_(text.data() + text.size()) {}

  Token Next() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n')) ++at_;
    const char* const begin = at_;
    return {Scan(), begin, static_cast<size_t>(at_ - begin)};
  }

 private:
  Token::Kind Scan() {
    if (at_ == end_) return Token::Kind::kEnd;
    const char first = *at_;
    if (IsLower(first)) {
      Skip([](char c) { return IsLower(c) || IsDigit(c) || c == '_'; });
      return Token::Kind::kName;
    }
    if (IsUpper(first)) {
      Skip([](char c) { return IsLower(c) || IsUpper(c); });
      return Token::Kind::kOperator;
    }
    if (IsDigit(first) || (first == '-' && IsDigit(At(1)))) {
      ++at_;
      Skip(IsDigit);
      if (At(0) == '.' && IsDigit(At(1))) {
        ++at_;
        Skip(IsDigit);
      }
      const ptrdiff_t sign = At(1) == '+' || At(1) == '-' ? 1 : 0;
      if (At(0) == 'e' && IsDigit(At(1 + sign))) {
        at_ += 1 + sign;
        Skip(IsDigit);
      }
      return Token::Kind::kNumber;
    }
    ++at_;
    return first != '\0' && std::strchr("=;,()", first) != nullptr ? Token::Kind::kSign : Token::Kind::kOther;
  }

  char At(ptrdiff_t ahead) const { return ahead < end_ - at_ ? at_[ahead] : '\0'; }
  template <class Is>
  void Skip(const Is& is) {
    while (at_ != end_ && is(*at_)) ++at_;
  }

  const char* at_;
  const char* end_;
};

// The float32 that is nearest to a decimal number. What the process's locale makes of a point does not matter: the
// number is read as a whole one and a power of ten.
float NumberOf(const std::string& text) {
  const size_t end = std::min(text.find('e'), text.size());
  std::string digits = text.substr(0, end);
  constexpr int64_t kMost = 1 << 30;  // a power of ten that makes infinity, or 0, of any number
  int64_t exponent = end == text.size() ? 0 : std::strtol(text.c_str() + end + 1, nullptr, 10);
  exponent = std::clamp(exponent, -kMost, kMost);
  const size_t point = digits.find('.');
  if (point != std::string::npos) {
    exponent -= static_cast<int64_t>(digits.size() - point - 1);
    digits.erase(point, 1);
  }
  const float value = std::strtof((digits + "e" + std::to_string(exponent)).c_str(), nullptr);
  if (!std::isfinite(value)) Fail(Quote(text), "a number of float32");
  return value;
}

struct Term {
  Token::Kind kind;  // a name, a number or an operator
  std::string text;  // of that
  float number;      // 0 if it is none
  std::string whole;
  std::vector<Term> arguments;
};

struct Assignment {
  std::string name;
  Term term;
  std::string whole;
};

// Reads the grammar; what names and operators there are is not its concern.
class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text), lexer_(text), token_(lexer_.Next()) {}

  std::vector<Assignment> Assignments() {
    std::vector<Assignment> assignments;
    while (true) {
      const char* const begin = token_.text;
      if (token_.kind != Token::Kind::kName) Unexpected("a name and '='");
      std::string name = Take();
      TakeSign('=', "'='");
      Term term = TakeTerm();
      assignments.push_back({std::move(name), std::move(term), std::string(begin, end_)});
      if (token_.kind == Token::Kind::kEnd) return assignments;
      TakeSign(';', "';'");
      if (token_.kind == Token::Kind::kEnd) return assignments;
    }
  }

 private:
  static constexpr const char* kTerm = "a number, a name or an operator";

  Term TakeTerm() {
    const char* const begin = token_.text;
    const Token::Kind kind = token_.kind;
    if (kind != Token::Kind::kName && kind != Token::Kind::kNumber && kind != Token::Kind::kOperator) Unexpected(kTerm);
    Term term{kind, Take(), 0, {}, {}};
    if (kind == Token::Kind::kNumber) term.number = NumberOf(term.text);
    if (kind == Token::Kind::kOperator) {
      // Terms that are deeper have more operators than there may be.
      if (++depth_ > PointwiseProgram::kMostInstructions) FailAsTooLong();
      TakeArguments(term.arguments);
      --depth_;
    }
    term.whole.assign(begin, end_);
    return term;
  }

  void TakeArguments(std::vector<Term>& arguments) {
    TakeSign('(', "'('");
    while (!token_.Is(')')) {
      arguments.push_back(TakeTerm());
      if (token_.Is(')')) break;
      TakeSign(',', "',' or ')'");
      if (token_.Is(')')) Unexpected(kTerm);
    }
    Take();
  }

  std::string Take() {
    std::string text(token_.text, token_.size);
    end_ = token_.text + token_.size;
    token_ = lexer_.Next();
    return text;
  }

  void TakeSign(char sign, const char* wanted) {
    if (!token_.Is(sign)) Unexpected(wanted);
    Take();
  }

  [[noreturn]] void Unexpected(const std::string& wanted) const {
    if (token_.kind == Token::Kind::kEnd) Fail(Quote(text_), wanted + " at its end");
    Fail(Quote(std::string(token_.text, token_.size)), wanted + " there");
  }

  const std::string& text_;
  Lexer lexer_;
  Token token_;
  const char* end_ = nullptr;  // of the last token that was taken
  int depth_ = 0;
};

// The number of a name such as x3, or -1.
int NumberOfName(const std::string& name, char first, int count) {
  const bool is_one = name.size() == 2 && name[0] == first && name[1] >= '0' && name[1] < '0' + count;
  return is_one ? name[1] - '0' : -1;
}

// Makes a program of assignments. While it does, the register of an instruction's result is its index.
class Compiler {
 public:
  Compiler() : program_(std::make_shared<PointwiseProgram>()) {}

  std::shared_ptr<const PointwiseProgram> Compile(const std::string& text, const std::vector<Assignment>& assignments) {
    for (const Assignment& assignment : assignments) Assign(assignment);
    if (!program_->assigns[0]) Fail(Quote(text), "an assignment to y0");
    for (const Assignment& assignment : assignments) {
      const auto found = names_.find(assignment.name);
      if (!found->second.is_read) Fail(Quote(assignment.whole), "a reader of " + assignment.name);
    }
    // As all are read, they are few enough.
    std::copy(constants_.begin(), constants_.end(), program_->constants);
    program_->constant_count = static_cast<int32_t>(constants_.size());
    ChooseRegisters();
    return program_;
  }

 private:
  struct Value {
    PointwiseOperand operand;
    Type type;
    bool is_read;
  };

  void Assign(const Assignment& assignment) {
    const std::string& name = assignment.name;
    if (NumberOfName(name, 'x', PointwiseArgs::kInputs) >= 0) {
      Fail(Quote(assignment.whole), "an assignment to another name, as " + name + " is an input");
    }
    if (names_.count(name) != 0) Fail(Quote(assignment.whole), "one assignment to " + name);
    Value value = ValueOf(assignment.term);
    const int output = NumberOfName(name, 'y', PointwiseArgs::kOutputs);
    value.is_read = output >= 0;
    names_.emplace(name, value);
    if (output < 0) return;
    if (value.type != Type::kNumber) Fail(Quote(assignment.whole), "a number for the output " + name);
    program_->outputs[output] = value.operand;
    program_->assigns[output] = true;
  }

  Value ValueOf(const Term& term) {
    if (term.kind == Token::Kind::kNumber) return {ConstantOf(term.number), Type::kNumber, true};
    if (term.kind == Token::Kind::kName) {
      const int input = NumberOfName(term.text, 'x', PointwiseArgs::kInputs);
      if (input >= 0) {
        program_->reads[input] = true;
        return {{PointwiseOperand::Kind::kInput, static_cast<uint8_t>(input)}, Type::kNumber, true};
      }
      const auto found = names_.find(term.text);
      if (found == names_.end()) Fail(Quote(term.text), "a name that is assigned before it is read");
      found->second.is_read = true;
      return found->second;
    }
    return ResultOf(term);
  }

  Value ResultOf(const Term& term) {
    const auto* const info = std::find_if(std::begin(kOperators), std::end(kOperators),
                                          [&](const OperatorInfo& one) { return term.text == one.name; });
    if (info == std::end(kOperators)) Fail(Quote(term.text), "an operator of Pointwise");
    if (term.arguments.size() != info->arity) {
      Fail(Quote(term.whole), std::to_string(info->arity) + " argument" + (info->arity == 1 ? "" : "s"));
    }
    if (++operators_ > PointwiseProgram::kMostInstructions) FailAsTooLong();
    PointwiseInstruction instruction{info->op, 0, info->arity, {}};
    for (int index = 0; index < info->arity; ++index) {
      const Term& argument_term = term.arguments[static_cast<size_t>(index)];
      const Value argument = ValueOf(argument_term);
      if (argument.type != info->arguments[index]) {
        Fail(Quote(argument_term.whole),
             std::string(info->arguments[index] == Type::kNumber ? "a number" : "a truth value") + " as argument of " +
                 info->name);
      }
      instruction.operands[index] = argument.operand;
    }
    instruction.result = static_cast<uint8_t>(program_->instruction_count);
    program_->instructions[program_->instruction_count++] = instruction;
    return {{PointwiseOperand::Kind::kRegister, instruction.result}, info->result, true};
  }

  // A number that occurs again is kept once. Its bits tell 0 from -0.
  PointwiseOperand ConstantOf(float number) {
    const auto found = std::find_if(constants_.begin(), constants_.end(),
                                    [&](float one) { return internal::BitsOf(one) == internal::BitsOf(number); });
    const auto index = static_cast<uint8_t>(found - constants_.begin());
    if (found == constants_.end()) constants_.push_back(number);
    return {PointwiseOperand::Kind::kConstant, index};
  }

  // Gives each result the first register that no result with a reader to come has. Outputs are read at the end.
  void ChooseRegisters() {
    const auto count = static_cast<size_t>(program_->instruction_count);
    std::vector<size_t> last(count, 0);  // reader
    const auto read = [&](const PointwiseOperand& operand, size_t reader) {
      if (operand.kind == PointwiseOperand::Kind::kRegister) last[operand.index] = reader;
    };
    for (size_t index = 0; index < count; ++index) {
      const PointwiseInstruction& instruction = program_->instructions[index];
      for (int k = 0; k < instruction.operand_count; ++k) read(instruction.operands[k], index);
    }
    for (int output = 0; output < PointwiseArgs::kOutputs; ++output) {
      if (program_->assigns[output]) read(program_->outputs[output], count);
    }

    std::vector<uint8_t> registers(count);
    std::vector<size_t> free_from;  // of each register, the reader from which on another result may take it
    const auto move = [&](PointwiseOperand& operand) {
      if (operand.kind == PointwiseOperand::Kind::kRegister) operand.index = registers[operand.index];
    };
    for (size_t index = 0; index < count; ++index) {
      const auto found = std::find_if(free_from.begin(), free_from.end(), [&](size_t from) { return from <= index; });
      const auto chosen = static_cast<size_t>(found - free_from.begin());
      if (found == free_from.end()) free_from.push_back(0);
      free_from[chosen] = last[index];
      registers[index] = static_cast<uint8_t>(chosen);
      PointwiseInstruction& instruction = program_->instructions[index];
      for (int k = 0; k < instruction.operand_count; ++k) move(instruction.operands[k]);
      instruction.result = registers[index];
    }
    for (int output = 0; output < PointwiseArgs::kOutputs; ++output) {
      if (program_->assigns[output]) move(program_->outputs[output]);
    }
    program_->register_count = static_cast<int32_t>(free_from.size());
    if (program_->register_count > PointwiseProgram::kMostRegisters) {
      Fail("of " + std::to_string(program_->register_count) + " values at once",
           "at most " + std::to_string(PointwiseProgram::kMostRegisters));
    }
  }

  std::shared_ptr<PointwiseProgram> program_;
  std::map<std::string, Value> names_;
  std::vector<float> constants_;
  int operators_ = 0;  // those begun
};

class Programs {
 public:
  std::shared_ptr<const PointwiseProgram> Find(const std::string& expression) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = programs_.find(expression);
    return found == programs_.end() ? nullptr : found->second;
  }

  void Keep(const std::string& expression, std::shared_ptr<const PointwiseProgram> program) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (programs_.size() >= kMost) programs_.clear();
    programs_.emplace(expression, std::move(program));
  }

 private:
  static constexpr size_t kMost = 1024;

  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const PointwiseProgram>> programs_;
};

}  // namespace

bool PointwiseProgram::draws() const {
  return std::any_of(instructions, instructions + instruction_count,
                     [](const PointwiseInstruction& one) { return one.op == PointwiseOp::kKept; });
}

Status FindProgram(const std::string& expression, std::shared_ptr<const PointwiseProgram>& program) {
  static auto& programs = *new Programs;  // for as long as any thread may run
  program = programs.Find(expression);
  if (program != nullptr) return {};
  try {
    program = Compiler().Compile(expression, Parser(expression).Assignments());
  } catch (const Refusal& refusal) {
    return refusal.status();
  }
  programs.Keep(expression, program);
  return {};
}

}  // namespace gradfuse
