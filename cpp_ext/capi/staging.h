#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "capi/tensor.h"
#include "gradfuse/signature.h"

namespace gradfuse::capi {

// An argument of the C function that is a tensor of the op's signature: lengths are arrays of the host.
struct Operand {
  Operand(const aclTensor* tensor_) : tensor(tensor_) {}
  Operand(const aclIntArray* array_) : array(array_) {}

  bool is_null() const { return tensor == nullptr && array == nullptr; }

  const aclTensor* tensor = nullptr;
  const aclIntArray* array = nullptr;
};

// A tensor of an op and the view that it stands for, of other strides or of memory that the op also reads.
struct Staged {
  Tensor* tensor;  // dense; its data lies in the workspace
  Tensor view;
  int64_t offset = 0;  // in the workspace
};

// What a plan has beside the op's arguments, and how it is made: independent of the op.
class Staging {
 public:
  // Points `tensor` at an input. Its values can be read until FinishChecks.
  void Input(const char* name, const Operand& operand, const TypeSet& types, bool device_is_host, Tensor& tensor);
  // Points `tensor` at an output that is to be `expected`.
  void Output(const char* name, const aclTensor& given, const Tensor& expected, Tensor& tensor);

  // Lays out the workspace, of which the op itself takes `op_bytes`, and gives its size.
  uint64_t LayOut(int64_t op_bytes);

  // Whether values are checked that may change until the op runs.
  bool reads_values() const { return reads_values_; }

  // Begins a run: points what is staged into the workspace. Gives the part for the op itself.
  char* Place(char* workspace);

  const std::vector<Staged>& inputs() const { return inputs_; }
  const std::vector<Staged>& outputs() const { return outputs_; }

 private:
  std::vector<Staged> inputs_;
  std::vector<Staged> outputs_;
  std::vector<Tensor> views_;                   // of all inputs in device memory
  std::deque<std::vector<int64_t>> arrays_;     // of the host
  std::deque<std::unique_ptr<char[]>> copies_;  // of values that are checked
  int64_t op_offset_ = 0;
  bool reads_values_ = false;
};

}  // namespace gradfuse::capi
