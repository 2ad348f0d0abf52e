#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "capi/tensor.h"
#include "gradfuse/signature.h"

namespace gradfuse::capi {

// An argument of the C function that is a tensor of the op's signature: lengths are arrays of the host.
struct Operand {
  // NOLINTBEGIN(*-explicit-constructor): a C function lists its arguments as they are
  Operand(const aclTensor* tensor) : handle(tensor) {}
  Operand(const aclIntArray* array) : handle(array), is_array(true) {}
  // NOLINTEND(*-explicit-constructor)

  const void* handle;
  bool is_array = false;
};

// What an operand refers to: a copy, so that another thread may destroy the operand meanwhile. Empty for a null
// operand.
struct Argument {
  const char* name = nullptr;
  std::optional<GivenTensor> tensor;
  IntArray array;
};

// Looks an operand up; throws an Error if it is unknown. Call it with the shared mutex held.
void ReadOperand(const char* name, const Operand& operand, Argument& argument);

// The numbers of an attribute that is an array. Throws an Error for a null pointer and an unknown array.
std::vector<int64_t> ReadNumbers(const char* name, const aclIntArray* array);

// An input of an op that is no dense tensor. It is copied to the workspace before the op runs.
struct StagedInput {
  Tensor* tensor = nullptr;  // of the op: the copy
  Tensor view;               // of the caller
  MutableTensor copy;        // dense
  int64_t offset = 0;        // of the copy in the workspace
};

// An output of an op whose view is no dense tensor, or lies in memory that the op also reads. The op writes to the
// workspace, and what it wrote is copied when it has run.
struct StagedOutput {
  MutableTensor* tensor = nullptr;  // of the op: dense, in the workspace
  MutableTensor view;               // of the caller
  int64_t offset = 0;               // of the tensor in the workspace

  Tensor result() const { return {tensor->data, *tensor}; }
};

// What a plan has beside the op's arguments, and how it is made: independent of the op.
class Staging {
 public:
  // Points `tensor` at an input: types, shapes and arrays of the host can be checked from now on.
  void Input(const Argument& argument, const TypeSet& types, Tensor& tensor);

  // Points `tensor` at the output *argument, which is to be `expected`. `inputs` are the arguments ahead of the
  // outputs, which begin at `outputs`.
  void Output(const Argument* inputs, const Argument* outputs, const Argument* argument, const TensorLayout& expected,
              MutableTensor& tensor);

  // Lets checks read the values of inputs in host memory. Inputs that are not dense are read from the copies that it
  // returns, as long as these live.
  std::vector<std::unique_ptr<char[]>> ReadValues();

  // Lays out the workspace, of which the op itself takes `op_bytes`, and returns its size.
  uint64_t LayOut(int64_t op_bytes);

  // Whether values are checked that may change until the op runs.
  bool reads_values() const { return !checked_.empty(); }

  // Begins a run: points what is staged into the workspace. Returns the part for the op itself.
  char* Place(char* workspace);

  const std::vector<StagedInput>& inputs() const { return inputs_; }
  const std::vector<StagedOutput>& outputs() const { return outputs_; }

 private:
  struct Checked {
    Tensor* tensor = nullptr;
    Tensor view;
  };

  std::vector<StagedInput> inputs_;
  std::vector<StagedOutput> outputs_;
  std::vector<Checked> checked_;
  std::vector<IntArray> arrays_;
  int64_t op_offset_ = 0;
};

}  // namespace gradfuse::capi
