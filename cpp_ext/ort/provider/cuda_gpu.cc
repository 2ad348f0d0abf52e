#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "ort/provider/gpu.h"

namespace gradfuse::gpu {
namespace {

void ThrowIfError(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or a kernel's start would report this error
  throw Error(std::string("CUDA is unable to ") + what + ": " + cudaGetErrorString(error));
}

cudaStream_t Stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t Event(void* event) { return static_cast<cudaEvent_t>(event); }

// A pool of the provider's own for a GPU, which keeps what is freed: that of the device belongs to the whole process.
// Null where the GPU has no pools.
cudaMemPool_t NewPool(int gpu) {
  int supported = 0;
  if (cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, gpu) != cudaSuccess || supported == 0) {
    cudaGetLastError();
    return nullptr;
  }
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = gpu;
  cudaMemPool_t pool = nullptr;
  ThrowIfError(cudaMemPoolCreate(&pool, &properties), "make a memory pool");
  std::unique_ptr<CUmemPoolHandle_st, decltype(&cudaMemPoolDestroy)> owner(pool, cudaMemPoolDestroy);
  uint64_t kept = UINT64_MAX;
  ThrowIfError(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept), "set up a memory pool");
  return owner.release();
}

cudaMemPool_t PoolOfThisGpu() {
  struct Pool {
    bool made = false;
    cudaMemPool_t pool = nullptr;
  };
  static std::mutex mutex;
  // Never destroyed: nothing can be asked of CUDA when static objects are.
  static auto& pools = *new std::vector<Pool>;
  int gpu = 0;
  ThrowIfError(cudaGetDevice(&gpu), "tell the current GPU");
  const std::lock_guard<std::mutex> lock(mutex);
  pools.resize(std::max(pools.size(), static_cast<size_t>(gpu) + 1));
  Pool& pool = pools[static_cast<size_t>(gpu)];
  if (!pool.made) pool = {true, NewPool(gpu)};
  return pool.pool;
}

}  // namespace

std::vector<Info> List(std::string& why_none) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    why_none = error == cudaErrorInsufficientDriver
                   ? "there is no NVIDIA driver, or one for an older CUDA than " +
                         std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION / 10 % 100)
                   : std::string("CUDA finds no GPU: ") + cudaGetErrorString(error);
    return {};
  }
  std::vector<Info> gpus;
  for (int gpu = 0; gpu < count; ++gpu) {
    cudaDeviceProp properties;
    ThrowIfError(cudaGetDeviceProperties(&properties, gpu), "describe a GPU");
    char pci_bus_id[32] = {};
    ThrowIfError(cudaDeviceGetPCIBusId(pci_bus_id, sizeof pci_bus_id, gpu), "tell a GPU's place on the bus");
    gpus.push_back({properties.name, pci_bus_id});
  }
  if (gpus.empty()) why_none = "CUDA finds no GPU";
  return gpus;
}

Selection::Selection(int gpu) {
  ThrowIfError(cudaGetDevice(&previous_), "tell the current GPU");
  changed_ = gpu != previous_;
  if (changed_) ThrowIfError(cudaSetDevice(gpu), "select a GPU");
}

Selection::~Selection() {
  if (changed_) cudaSetDevice(previous_);
}

void* NewStream() {
  cudaStream_t stream = nullptr;
  ThrowIfError(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
  return stream;
}

void DeleteStream(void* stream) { cudaStreamDestroy(Stream(stream)); }

void Synchronize(void* stream) { ThrowIfError(cudaStreamSynchronize(Stream(stream)), "finish the work of a stream"); }

void* NewEvent() {
  cudaEvent_t event = nullptr;
  ThrowIfError(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "make an event");
  return event;
}

void DeleteEvent(void* event) { cudaEventDestroy(Event(event)); }

void Record(void* event, void* stream) {
  ThrowIfError(cudaEventRecord(Event(event), Stream(stream)), "record an event");
}

void WaitOnDevice(void* stream, void* event) {
  ThrowIfError(cudaStreamWaitEvent(Stream(stream), Event(event), 0), "make a stream wait");
}

void WaitOnHost(void* event) { ThrowIfError(cudaEventSynchronize(Event(event)), "wait for an event"); }

void* Allocate(size_t bytes, void* stream) {
  void* memory = nullptr;
  cudaMemPool_t pool = PoolOfThisGpu();
  const cudaError_t error =
      pool != nullptr ? cudaMallocFromPoolAsync(&memory, bytes, pool, Stream(stream)) : cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  ThrowIfError(error, "allocate memory");
  return memory;
}

void Free(void* memory, void* stream) {
  // Without pools memory came from cudaMalloc; cudaFree waits for all that uses it.
  const cudaError_t error = PoolOfThisGpu() != nullptr ? cudaFreeAsync(memory, Stream(stream)) : cudaFree(memory);
  if (error != cudaSuccess) cudaGetLastError();
}

void Copy(void* to, const void* from, size_t bytes, void* stream) {
  ThrowIfError(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, Stream(stream)), "copy memory");
}

}  // namespace gradfuse::gpu
