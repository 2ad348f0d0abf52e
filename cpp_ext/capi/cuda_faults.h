#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "capi/executor.h"
#include "gradfuse/fault.h"

namespace gradfuse::capi {

// What the runs on the streams of a CUDA device found in their inputs that an op does not take: known when the device
// gets there, told when the host waits for the stream.
class CudaFaults {
 public:
  // The cell for Queue::fault of a run.
  int32_t* CellOf(const void* stream, const Executor& executor);

  // Throws an Error for the first cell of a stream with something in it, and empties them all.
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
