#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "gradfuse/fault.h"
#include "gradfuse/op_table.h"
#include "gradfuse/queue.h"
#include "gradfuse/signature.h"
#include "ort/api.h"
#include "ort/provider/gpu.h"
#include "ort/provider/provider.h"

namespace gradfuse::ort {

// Device memory from the allocator of the provider that a node runs on. Given back when the kernels that use it are on
// the stream: the allocator hands it out again in the order of the stream.
class ScratchBuffer {
 public:
  // `neighbour` is a tensor in the memory that is wanted.
  ScratchBuffer(const OrtApi& api, const OrtKernelContext* context, const OrtValue* neighbour, size_t bytes);
  ~ScratchBuffer();
  ScratchBuffer(const ScratchBuffer&) = delete;
  ScratchBuffer& operator=(const ScratchBuffer&) = delete;

  void* data() const { return data_; }

 private:
  Owned<OrtAllocator> allocator_;
  void* data_ = nullptr;
};

class CudaDevice {
 public:
  static constexpr const char* kProvider = "CUDAExecutionProvider";
  static constexpr bool kOnHost = false;

  explicit CudaDevice(const OrtApi& api) : api_(api), fault_(cuda::NewFault()) {}

  template <class Args>
  Status Run(const Args& args, OrtKernelContext* context, const OrtValue* output) const {
    // What a kernel finds wrong is known when the device gets there. Nothing waits for that, so the next run tells.
    if (const int32_t place = TakeFault(); place != 0) {
      return Refuse(InputName<Args>(place), "out of range in an earlier run", "values that the operator takes");
    }
    Queue queue;
    ThrowIfError(api_, api_.KernelContext_GetGPUComputeStream(context, &queue.stream));
    const ScratchBuffer workspace(api_, context, output, static_cast<size_t>(cuda::WorkspaceBytes(args)));
    queue.workspace = workspace.data();
    queue.fault = fault_.get();
    return cuda::Run(args, queue);
  }

 protected:
  const OrtApi& api_;

 private:
  int32_t TakeFault() const;

  cuda::Fault fault_;
};

// The same for nodes on the execution provider of this library.
class ProviderDevice : public CudaDevice {
 public:
  static constexpr const char* kProvider = kProviderName;

  using CudaDevice::CudaDevice;

  template <class Args>
  Status Run(const Args& args, OrtKernelContext* context, const OrtValue* output) const {
    const OrtMemoryInfo* memory = nullptr;
    ThrowIfError(api_, api_.GetTensorMemoryInfo(output, &memory));
    int number = 0;
    ThrowIfError(api_, api_.MemoryInfoGetId(memory, &number));
    void* stream = nullptr;
    ThrowIfError(api_, api_.KernelContext_GetGPUComputeStream(context, &stream));
    if (stream == nullptr) return {StatusCode::kNotSupported, "this onnxruntime was built without streams"};
    const gpu::Selection selection(number);
    return CudaDevice::Run(args, context, output);
  }
};

}  // namespace gradfuse::ort
