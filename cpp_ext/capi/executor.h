#pragma once

#include <cstdint>
#include <memory>

#include "acl/acl.h"
#include "gradfuse/parallel.h"
#include "gradfuse/queue.h"

namespace gradfuse::capi {

// The name of the input at a place of an op's signature, counted from 1.
using InputNameFunction = const char* (*)(int32_t place);

// One run of an op: all that the first phase has checked and planned. Where a tensor is no dense one, a dense copy of
// it lies in the workspace while the op runs.
class Executor {
 public:
  Executor(const char* op, InputNameFunction name_of_input) : op_(op), input_name_(name_of_input) {}
  virtual ~Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  const char* op() const { return op_; }
  InputNameFunction input_name() const { return input_name_; }
  // What the caller is to give: room enough wherever it begins.
  uint64_t workspace_bytes() const { return workspace_bytes_; }

  // Both throw an Error where they fail. What an input holds is checked once more on the CPU, as it may have changed
  // since it was planned.
  virtual void RunOnCpu(char* workspace, const ParallelFor& parallel) = 0;
#ifdef GRADFUSE_HAVE_CUDA
  // Returns when all is on the stream. `queue` has no workspace yet.
  virtual void StartOnCuda(char* workspace, Queue queue) = 0;
#endif

 protected:
  void set_workspace_bytes(uint64_t bytes) { workspace_bytes_ = bytes; }

 private:
  const char* op_;
  InputNameFunction input_name_;
  uint64_t workspace_bytes_ = 0;
};

// The second phase of the op that is called `op`: of the C function `function`.
aclnnStatus Execute(const char* function, const char* op, void* workspace, uint64_t workspace_bytes,
                    aclOpExecutor* handle, aclrtStream stream) noexcept;

// Makes the executor of the op's first phase one that Execute knows.
aclOpExecutor* AddExecutor(std::unique_ptr<Executor> executor);

// Gives up all that were never run.
void DropExecutors();

}  // namespace gradfuse::capi
