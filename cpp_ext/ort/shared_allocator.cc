#include "ort/shared_allocator.h"

#ifdef __linux__
#include <pthread.h>
#endif

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>

#include "kernels/cpu/scratch.h"
#include "ort/memory_pool.h"

namespace gradfuse::ort {
namespace {

// Sessions of older runtimes do not take the allocator.
constexpr uint32_t kFirstWithPool = 23;
constexpr char kUseEnvAllocators[] = "session.use_env_allocators";
// From here on values are in the pool. The C library is good at smaller ones.
constexpr size_t kLarge = size_t{64} << 10;
std::mutex mutex;                         // for registering
std::atomic<MemoryPool*> pool = nullptr;  // of the process; never destroyed: sessions may outlive static objects

#ifdef __linux__
void BeforeFork() {
  mutex.lock();
  if (pool != nullptr) pool.load()->Lock();
}

void AfterFork() {
  if (pool != nullptr) pool.load()->Unlock();
  mutex.unlock();
}
#endif

void* AllocateFromPool(size_t bytes) {
  try {
    return pool.load()->Allocate(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

constexpr cpu::ScratchSource kScratch{
    AllocateFromPool,
    [](const void* memory) { return pool.load()->Contains(memory); },
    [](void* memory) { pool.load()->Free(memory); },
};

// Large values of runs are in the pool. All else, and what does not fit, is of ONNX Runtime's own allocator, which also
// reports that memory is out in the way that ONNX Runtime understands.
struct Allocator : OrtAllocator {
  Allocator(OrtMemoryInfo* memory, OrtAllocator* other) : OrtAllocator{}, info(memory), others(other) {
    version = 18;  // The first with Reserve; later functions are optional.
    Alloc = [](OrtAllocator* self, size_t bytes) -> void* {
      void* memory = bytes < kLarge ? nullptr : AllocateFromPool(bytes);
      return memory != nullptr ? memory : Others(self)->Alloc(Others(self), bytes);
    };
    // What a session keeps, such as packed weights.
    Reserve = [](OrtAllocator* self, size_t bytes) -> void* { return Others(self)->Alloc(Others(self), bytes); };
    Free = [](OrtAllocator* self, void* memory) {
      if (pool.load()->Contains(memory)) {
        pool.load()->Free(memory);
      } else {
        Others(self)->Free(Others(self), memory);
      }
    };
    Info = [](const OrtAllocator* self) -> const OrtMemoryInfo* { return static_cast<const Allocator*>(self)->info; };
  }

  static OrtAllocator* Others(OrtAllocator* self) { return static_cast<Allocator*>(self)->others; }

  const OrtMemoryInfo* info;
  OrtAllocator* others;
};

// Gives the process a pool, and ONNX Runtime the allocator, which it keeps for ever. Whether it has taken it. It does
// not tell whether sessions shared another allocator before, which it replaces.
bool Register(const OrtApi& api) {
  OrtAllocator* others = nullptr;
  OrtMemoryInfo* info = nullptr;
  OrtEnv* env = nullptr;  // of the process, which has one
  if (!Succeeded(api, api.GetAllocatorWithDefaultOptions(&others)) ||
      !Succeeded(api, api.CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &info)) ||
      !Succeeded(api, api.CreateEnv(ORT_LOGGING_LEVEL_WARNING, "gradfuse", &env))) {
    return false;
  }
  const Owned<OrtEnv> owner(env, api.ReleaseEnv);
  auto made = MemoryPool::Create();
  if (made == nullptr) return false;
#ifdef __linux__
  if (pthread_atfork(BeforeFork, AfterFork, AfterFork) != 0) return false;
#endif
  pool = made.release();
  cpu::SetScratchSource(&kScratch);
  return Succeeded(api, api.RegisterAllocator(env, new Allocator(info, others)));
}

}  // namespace

void UseMemoryPool(const OrtApi& api, uint32_t version, OrtSessionOptions* options) {
  const auto has = [&](const char* entry) {
    int found = 0;
    ThrowIfError(api, api.HasSessionConfigEntry(options, entry, &found));
    return found != 0;
  };
  if (version < kFirstWithPool || !has(kMemoryPoolEntry)) return;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    static const bool is_registered = Register(api);
    if (!is_registered) return;
  }
  if (!has(kUseEnvAllocators)) ThrowIfError(api, api.AddSessionConfigEntry(options, kUseEnvAllocators, "1"));
}

}  // namespace gradfuse::ort

// Bytes that values have in the pool, and that the pool holds. If `trim` is not 0, it first returns what is free.
extern "C" __attribute__((visibility("default"))) void gradfuse_memory_pool(int trim, uint64_t* used, uint64_t* held) {
  auto* pool = gradfuse::ort::pool.load();
  if (pool != nullptr && trim != 0) pool->Trim();
  *used = pool == nullptr ? 0 : pool->used();
  *held = pool == nullptr ? 0 : pool->held();
}
