#pragma once

#include <cstdint>
#include <memory>

#include "acl/acl.h"
#include "gradfuse/parallel.h"
#include "gradfuse/queue.h"

namespace gradfuse::capi {

// The name of the input at a place of an op's signature, counted from 1.
using InputNameFunction = const char* (*)(int32_t place);

// One run of an op: everything that the first phase checked and planned. A tensor that is not dense has a dense copy in
// the workspace while the op runs.
class Executor {
 public:
  Executor(const char* op, InputNameFunction name_of_input) : op_(op), input_name_(name_of_input) {}
  virtual ~Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  const char* op() const { return op_; }
  InputNameFunction input_name() const { return input_name_; }
  // What the caller must provide: enough room wherever it begins.
  uint64_t workspace_bytes() const { return workspace_bytes_; }

  // Both throw an Error if they fail. On the CPU the values of inputs are checked again, as they may have changed since
  // planning.
  virtual void RunOnCpu(char* workspace, const ParallelFor& parallel) = 0;
#ifdef GRADFUSE_HAVE_CUDA
  // Returns once all work is on the stream. `queue` has no workspace yet.
  virtual void StartOnCuda(char* workspace, Queue queue) = 0;
#endif

 protected:
  void set_workspace_bytes(uint64_t bytes) { workspace_bytes_ = bytes; }

 private:
  const char* op_;
  InputNameFunction input_name_;
  uint64_t workspace_bytes_ = 0;
};

// The second phase of the op named `op`, for the C function `function`.
aclnnStatus Execute(const char* function, const char* op, void* workspace, uint64_t workspace_bytes,
                    aclOpExecutor* handle, aclrtStream stream) noexcept;

// Registers the executor that a first phase made, so that Execute finds it.
aclOpExecutor* AddExecutor(std::unique_ptr<Executor> executor);

// Drops all executors that were never run.
void DropExecutors();

}  // namespace gradfuse::capi
