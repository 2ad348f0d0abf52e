#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "capi/executor.h"
#include "gradfuse/fault.h"

namespace gradfuse::capi {

// Values in inputs that an op does not take. The device finds them when it gets there; the host reports them when it
// waits for the stream.
class CudaFaults {
 public:
  // The cell for Queue::fault of a run.
  int32_t* CellOf(const void* stream, const Executor& executor);

  // Throws an Error for the first fault found on a stream, and clears all of them.
  void ThrowAny(const void* stream);

  void Forget(const void* stream);

 private:
  struct Cell {
    const char* op;
    InputNameFunction input_name;
    cuda::Fault fault;
  };

  std::mutex mutex_;
  std::map<const void*, std::vector<Cell>> cells_;  // of each stream, one an op
};

}  // namespace gradfuse::capi
