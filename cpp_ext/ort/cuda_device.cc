#include "ort/cuda_device.h"

namespace gradfuse::ort {

ScratchBuffer::ScratchBuffer(const OrtApi& api, const OrtKernelContext* context, const OrtValue* neighbour,
                             size_t bytes)
    : allocator_(nullptr, api.ReleaseAllocator) {
  if (bytes == 0) return;
  const OrtMemoryInfo* memory = nullptr;
  ThrowIfError(api, api.GetTensorMemoryInfo(neighbour, &memory));
  OrtAllocator* allocator = nullptr;
  ThrowIfError(api, api.KernelContext_GetAllocator(context, memory, &allocator));
  allocator_.reset(allocator);
  // Unlike the allocator's own Alloc this knows the stream that the memory is for.
  ThrowIfError(api, api.KernelContext_GetScratchBuffer(context, memory, bytes, &data_));
}

ScratchBuffer::~ScratchBuffer() {
  if (data_ != nullptr) allocator_->Free(allocator_.get(), data_);
}

int32_t CudaDevice::TakeFault() const {
  // The device writes it behind the compiler's back.
  volatile int32_t* fault = fault_.get();
  if (fault == nullptr || *fault == 0) return 0;
  const int32_t place = *fault;
  *fault = 0;
  return place;
}

}  // namespace gradfuse::ort
