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
  const OrtApi& api_;
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
};

// The name of the input at `place` of an op's signature, counted from 1.
class InputName {
 public:
  explicit InputName(int32_t place) : rest_(place) {}
  template <class Value>
  void Input(const char* name, const Value&, const TypeSet&) {
    if (--rest_ == 0) name_ = name;
  }
  template <class Value>
  void Attribute(const char*, const Value&) {}
  void Output(const char*, const Tensor&, const TypeSet&) {}

  const char* name() const { return name_; }

 private:
  int32_t rest_;
  const char* name_ = "an input";
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
      InputName input(place);
      Args::Visit(args, input);
      return Refuse(input.name(), "out of range in an earlier run", "values that the operator takes");
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
