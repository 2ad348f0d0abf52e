#pragma once

#include <cstdint>

namespace gradfuse {

// Where a CUDA kernel of an op runs. A call puts its work on the stream and returns: it neither waits for the device
// nor reads anything back from it.
struct Queue {
  void* stream = nullptr;     // a cudaStream_t
  void* workspace = nullptr;  // WorkspaceBytes(args) bytes of device memory, aligned to 256 bytes, for this call alone
  // A number that device and host can read, or null. Where an input holds values that the op does not take, the device
  // sets it to the input's place in the op's signature, counted from 1; nothing sets it back. Such values read and
  // write nothing out of bounds; what they spoil is NaN.
  int32_t* fault = nullptr;
};

}  // namespace gradfuse
