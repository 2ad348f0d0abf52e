#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "acl/acl.h"
#include "capi/executor.h"

namespace gradfuse::capi {

// What the C API runs on. Everything throws an Error where it fails.
class Device {
 public:
  virtual ~Device() = default;

  // The device that the environment variable GRADFUSE_DEVICE names, "cpu" or "cuda". By default it is CUDA if the
  // library has it and finds a GPU, else the CPU. It never changes during the life of a process.
  static Device& Current();

  // Whether the host can read the device's memory, so that values can be checked when a run is planned.
  virtual bool is_host() const = 0;

  virtual void Set(int32_t id) = 0;
  virtual void Reset(int32_t id) = 0;

  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* memory) = 0;
  virtual void Copy(void* to, const void* from, size_t bytes, aclrtMemcpyKind kind) = 0;

  virtual aclrtStream CreateStream() = 0;
  virtual void DestroyStream(aclrtStream stream) = 0;
  virtual void Synchronize(aclrtStream stream) = 0;
  // Throws an Error if runs cannot be put on the stream.
  virtual void ExpectStream(aclrtStream stream) = 0;
  // Puts a run on a stream.
  virtual void Execute(std::unique_ptr<Executor> executor, char* workspace, aclrtStream stream) = 0;
};

Device& CpuDevice();

// Null where there is no GPU, or no driver.
Device* CudaDeviceOrNull();

}  // namespace gradfuse::capi
