#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "capi/cuda_faults.h"
#include "capi/device.h"
#include "capi/error.h"
#include "capi/shared_mutex.h"

namespace gradfuse::capi {
namespace {

void Expect(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch would report this error
  const std::string message = std::string("CUDA: ") + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) throw Error(ACL_ERROR_BAD_ALLOC, message);
  if (error == cudaErrorInvalidValue || error == cudaErrorInvalidDevice || error == cudaErrorInvalidResourceHandle) {
    throw Error(ACL_ERROR_INVALID_PARAM, message);
  }
  throw Error(ACL_ERROR_FAILURE, message);
}

cudaMemcpyKind ToCuda(aclrtMemcpyKind kind) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_DEVICE: return cudaMemcpyHostToDevice;
    case ACL_MEMCPY_DEVICE_TO_HOST: return cudaMemcpyDeviceToHost;
    case ACL_MEMCPY_DEVICE_TO_DEVICE: return cudaMemcpyDeviceToDevice;
    case ACL_MEMCPY_HOST_TO_HOST: break;
  }
  return cudaMemcpyHostToHost;
}

// A stream is a cudaStream_t, also one that the caller has from CUDA itself.
class Cuda final : public Device {
 public:
  bool is_host() const override { return false; }

  void Set(int32_t id) override { Expect(cudaSetDevice(id)); }
  void Reset(int32_t id) override {
    int current = 0;
    Expect(cudaGetDevice(&current));
    if (id != current) {
      throw Error(ACL_ERROR_INVALID_PARAM, "deviceId is " + std::to_string(id) + "; expected " +
                                               std::to_string(current) + ", the device of this thread");
    }
    Expect(cudaDeviceSynchronize());
  }

  void* Allocate(size_t bytes) override {
    void* memory = nullptr;
    Expect(cudaMalloc(&memory, bytes));
    return memory;
  }
  void Free(void* memory) override { Expect(cudaFree(memory)); }
  void Copy(void* to, const void* from, size_t bytes, aclrtMemcpyKind kind) override {
    Expect(cudaMemcpy(to, from, bytes, ToCuda(kind)));
    // Copies within the device return before they are done.
    if (kind == ACL_MEMCPY_DEVICE_TO_DEVICE) Expect(cudaStreamSynchronize(nullptr));
  }

  aclrtStream CreateStream() override {
    cudaStream_t stream = nullptr;
    Expect(cudaStreamCreate(&stream));
    std::unique_ptr<CUstream_st, decltype(&cudaStreamDestroy)> owner(stream, cudaStreamDestroy);
    const std::lock_guard lock(SharedMutex());
    streams_.insert(stream);
    return owner.release();
  }
  void DestroyStream(aclrtStream stream) override {
    {
      const std::lock_guard lock(SharedMutex());
      if (streams_.erase(stream) == 0) {
        throw Error(ACL_ERROR_INVALID_PARAM,
                    "stream is unknown or already destroyed; expected one of aclrtCreateStream");
      }
    }
    Expect(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
    faults_.Forget(stream);
    Expect(cudaStreamDestroy(static_cast<cudaStream_t>(stream)));
  }
  void Synchronize(aclrtStream stream) override {
    Expect(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
    faults_.ThrowAny(stream);
  }

  void ExpectStream(aclrtStream) override {}  // CUDA's own streams are not ours to know

  void Execute(std::unique_ptr<Executor> executor, char* workspace, aclrtStream stream) override {
    Queue queue;
    queue.stream = stream;
    queue.fault = faults_.CellOf(stream, *executor);
    executor->StartOnCuda(workspace, queue);
  }

 private:
  std::set<aclrtStream> streams_;  // those that are CreateStream's, as CUDA says nothing sure about one that is gone
  CudaFaults faults_;
};

}  // namespace

Device* CudaDeviceOrNull() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    cudaGetLastError();  // or the next launch would report this error
    return nullptr;
  }
  static Device& device = *new Cuda;
  return &device;
}

}  // namespace gradfuse::capi
