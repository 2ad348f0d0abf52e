#pragma once

#include <cstdint>

namespace gradfuse {

// Where a CUDA kernel of an op runs. A call puts its work on the stream and returns: it neither waits for the device
// nor reads anything back from it.
struct Queue {
  void* stream = nullptr;     // a cudaStream_t
  void* workspace = nullptr;  // WorkspaceBytes(args) bytes of device memory, aligned to 256 bytes, for this call alone
  // A number that both device and host can read, or null. If an input holds values that the op does not take, the
  // device sets it to the input's position in the op's signature, counted from 1, and never resets it. Such values
  // cause no access out of bounds; the results that they affect are NaN.
  int32_t* fault = nullptr;
};

}  // namespace gradfuse
