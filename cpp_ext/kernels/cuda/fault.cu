#include <cuda_runtime.h>

#include "gradfuse/fault.h"

namespace gradfuse::cuda {

void DeleteFault::operator()(int32_t* fault) const { cudaFreeHost(fault); }

Fault NewFault() {
  void* memory = nullptr;
  // Host and device know it by one address.
  if (cudaHostAlloc(&memory, sizeof(int32_t), cudaHostAllocMapped | cudaHostAllocPortable) != cudaSuccess) {
    cudaGetLastError();  // or the next launch would report this error
    return nullptr;
  }
  Fault fault(static_cast<int32_t*>(memory));
  *fault = 0;
  return fault;
}

}  // namespace gradfuse::cuda
