#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "capi/device.h"
#include "capi/error.h"
#include "capi/executor.h"
#include "capi/shared_mutex.h"
#include "capi/staging.h"
#include "gradfuse/op_table.h"
#include "gradfuse/signature.h"
#include "gradfuse/strided_copy.h"

// The first phase of any op: it makes an executor from C arguments.
namespace gradfuse::capi {

// Throws an Error if an operand that the op needs is null.
class NullCheck {
 public:
  explicit NullCheck(const Operand* first) : next_(first) {}

  void Input(const char* name, const Tensor&, const TypeSet&) { Expect(name); }
  void Input(const char*, const std::optional<Tensor>&, const TypeSet&) { ++next_; }
  template <class Value>
  void Attribute(const char*, const Value&) {}
  void Output(const char* name, const MutableTensor&, const TypeSet&) { Expect(name); }

 private:
  void Expect(const char* name) {
    if ((next_++)->handle != nullptr) return;
    throw Error(ACLNN_ERR_PARAM_NULLPTR, std::string(name) + " is a null pointer; expected one to an argument");
  }

  const Operand* next_;
};

// Looks up the operands and fills the arguments; throws an Error for an unknown operand. Use it with the shared mutex
// held.
class OperandReader {
 public:
  OperandReader(const Operand* first, Argument* first_argument) : next_(first), next_argument_(first_argument) {}

  template <class Value>
  void Input(const char* name, const Value&, const TypeSet&) {
    Read(name);
  }
  template <class Value>
  void Attribute(const char*, const Value&) {}
  void Output(const char* name, const MutableTensor&, const TypeSet&) { Read(name); }

 private:
  void Read(const char* name) { ReadOperand(name, *next_++, *next_argument_++); }

  const Operand* next_;
  Argument* next_argument_;
};

template <class Args>
class Plan final : public Executor {
 public:
  // `arguments` are the op's inputs and outputs; `set_attributes` gets the arguments to put the attributes in.
  template <class SetAttributes>
  Plan(const Argument* arguments, const SetAttributes& set_attributes, const Device& device)
      : Executor(Args::kName, InputName<Args>) {
    // All types and shapes, of outputs too, before any value is looked at or copied.
    InputReader inputs{staging_, arguments};
    Args::Visit(args_, inputs);
    set_attributes(args_);
    ThrowIfError(Check(args_));
    const std::vector<Shape> shapes = OutputShapes(args_);
    OutputReader outputs{staging_, arguments, inputs.next, inputs.next, shapes.data(), inputs.t, inputs.a};
    Args::Visit(args_, outputs);
    if (device.is_host() && staging_.reads_values()) {
      const auto copies = staging_.ReadValues();
      ThrowIfError(Check(args_));
    }
    int64_t op_bytes = 0;
#ifdef GRADFUSE_HAVE_CUDA
    if (!device.is_host()) op_bytes = cuda::WorkspaceBytes(args_);
#endif
    set_workspace_bytes(staging_.LayOut(op_bytes));
  }

  void RunOnCpu(char* workspace, const ParallelFor& parallel) override {
    staging_.Place(workspace);
    for (const StagedInput& input : staging_.inputs()) cpu::StridedCopy(input.view, input.copy, parallel);
    if (staging_.reads_values()) ThrowIfError(Check(args_));
    cpu::Run(args_, parallel);
    for (const StagedOutput& output : staging_.outputs()) {
      cpu::StridedCopy(output.result(), output.view, parallel);
    }
  }

#ifdef GRADFUSE_HAVE_CUDA
  void StartOnCuda(char* workspace, Queue queue) override {
    queue.workspace = staging_.Place(workspace);
    for (const StagedInput& input : staging_.inputs()) ThrowIfError(cuda::StridedCopy(input.view, input.copy, queue));
    ThrowIfError(cuda::Run(args_, queue));
    for (const StagedOutput& output : staging_.outputs()) {
      ThrowIfError(cuda::StridedCopy(output.result(), output.view, queue));
    }
  }
#endif

 private:
  struct InputReader {
    void Input(const char*, Tensor& tensor, const TypeSet& types) {
      staging.Input(*next++, types, tensor);
      if (types.is_t() && !t) t = tensor.dtype;
      if (types.is_a() && !a) a = tensor.dtype;
    }
    void Input(const char* name, std::optional<Tensor>& tensor, const TypeSet& types) {
      if (!next->tensor && next->array == nullptr) {
        ++next;
      } else {
        Input(name, tensor.emplace(), types);
      }
    }
    template <class Value>
    void Attribute(const char*, const Value&) {}
    void Output(const char*, const MutableTensor&, const TypeSet&) {}

    Staging& staging;
    const Argument* next = nullptr;
    std::optional<DType> t = std::nullopt;
    std::optional<DType> a = std::nullopt;
  };

  struct OutputReader {
    template <class Value>
    void Input(const char*, const Value&, const TypeSet&) {}
    template <class Value>
    void Attribute(const char*, const Value&) {}
    void Output(const char*, MutableTensor& tensor, const TypeSet& types) {
      const DType activation = a.value_or(DType::kFloat32);
      const DType dtype = types.Choice(0, t.value_or(activation), activation);
      staging.Output(inputs, outputs, next++, TensorLayout(dtype, *shape++), tensor);
    }

    Staging& staging;
    const Argument* inputs = nullptr;
    const Argument* outputs = nullptr;
    const Argument* next = nullptr;
    const Shape* shape = nullptr;
    std::optional<DType> t = std::nullopt;
    std::optional<DType> a = std::nullopt;
  };

  Args args_;
  Staging staging_;
};

// The first phase of the op with arguments Args, for the C function `function`. `operands` are its inputs and outputs
// in the order of the op's signature.
template <class Args, size_t kOperands, class SetAttributes>
aclnnStatus Prepare(const char* function, const Operand (&operands)[kOperands], const SetAttributes& set_attributes,
                    uint64_t* workspace_bytes, aclOpExecutor** handle) noexcept {
  return GuardedOp(function, [&] {
    const Args none;
    NullCheck nulls(operands);
    Args::Visit(none, nulls);
    ExpectPointer(workspace_bytes, "workspaceSize", "an address", ACLNN_ERR_PARAM_NULLPTR);
    ExpectPointer(handle, "executor", "an address", ACLNN_ERR_PARAM_NULLPTR);
    Argument arguments[kOperands];
    {
      OperandReader reader(operands, arguments);
      const std::lock_guard lock(SharedMutex());
      Args::Visit(none, reader);
    }
    auto plan = std::make_unique<Plan<Args>>(arguments, set_attributes, Device::Current());
    const uint64_t bytes = plan->workspace_bytes();
    *handle = AddExecutor(std::move(plan));
    *workspace_bytes = bytes;
  });
}

}  // namespace gradfuse::capi

// Defines the second phase of an op, aclnn<Name>.
#define GRADFUSE_DEFINE_SECOND_PHASE(Name)                                                                         \
  aclnnStatus aclnn##Name(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {  \
    return gradfuse::capi::Execute("aclnn" #Name, gradfuse::Name##Args::kName, workspace, workspaceSize, executor, \
                                   stream);                                                                        \
  }
