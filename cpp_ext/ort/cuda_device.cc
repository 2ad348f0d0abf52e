#include "ort/cuda_device.h"

namespace gradfuse::ort {

ScratchBuffer::ScratchBuffer(const OrtApi& api, const OrtKernelContext* context, const OrtValue* neighbour,
                             size_t bytes)
    : api_(api) {
  if (bytes == 0) return;
  const OrtMemoryInfo* memory = nullptr;
  ThrowIfError(api, api.GetTensorMemoryInfo(neighbour, &memory));
  ThrowIfError(api, api.KernelContext_GetAllocator(context, memory, &allocator_));
  // Unlike the allocator's own Alloc this knows the stream that the memory is for.
  if (OrtStatus* status = api.KernelContext_GetScratchBuffer(context, memory, bytes, &data_); status != nullptr) {
    api.ReleaseAllocator(allocator_);
    ThrowIfError(api, status);
  }
}

ScratchBuffer::~ScratchBuffer() {
  if (data_ != nullptr) allocator_->Free(allocator_, data_);
  if (allocator_ != nullptr) api_.ReleaseAllocator(allocator_);
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
