#pragma once

#include <mutex>
#include <unordered_map>

#include "ort/api.h"
#include "ort/provider/gpu.h"

// Memory and streams of one GPU, as ONNX Runtime asks an execution provider for them.
namespace gradfuse::ort {

// The stream of a GPU for what ONNX Runtime asks for outside of a session's run. Lives forever.
// Throws gpu::Error.
void* OwnStream(int gpu);

// The allocator of a GPU's memory, for all sessions. A tensor's memory is freed in the order of the stream that it was
// allocated on, since that is where its last use is.
class GpuMemory : public OrtAllocator {
 public:
  // `info` describes the memory.
  GpuMemory(const OrtApi& api, int gpu, Owned<OrtMemoryInfo> info);
  ~GpuMemory() = default;
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  int gpu() const { return gpu_; }
  const OrtMemoryInfo* info() const { return info_.get(); }
  // To be called before a stream ends, when all work on it is done.
  void Forget(void* stream);

 private:
  void* Take(size_t bytes, void* stream) noexcept;
  void GiveBack(void* memory) noexcept;

  const OrtApi& api_;
  const int gpu_;
  const Owned<OrtMemoryInfo> info_;
  std::mutex mutex_;
  std::unordered_map<void*, void*> stream_of_;  // of memory that is in use
};

// Throws gpu::Error.
OrtSyncStreamImpl* NewSyncStream(const OrtApi& api, GpuMemory& memory);

}  // namespace gradfuse::ort
