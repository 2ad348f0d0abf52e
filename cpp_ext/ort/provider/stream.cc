#include "ort/provider/stream.h"

#include <map>
#include <memory>
#include <utility>

#include "ort/provider/api.h"

namespace gradfuse::ort {
namespace {

void* NewStreamOf(int gpu) {
  const gpu::Selection selection(gpu);
  return gpu::NewStream();
}

void* NewEventOf(int gpu) {
  const gpu::Selection selection(gpu);
  return gpu::NewEvent();
}

class Stream : public OrtSyncStreamImpl {
 public:
  Stream(const OrtApi& api, GpuMemory& memory);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const OrtApi& api() const { return api_; }
  int gpu() const { return memory_.gpu(); }
  void* handle() const { return handle_; }

 private:
  static Stream& From(OrtSyncStreamImpl* stream) { return *static_cast<Stream*>(stream); }

  const OrtApi& api_;
  GpuMemory& memory_;
  void* const handle_;
};

// That what was on a stream when it was activated is done.
class Notification : public OrtSyncNotificationImpl {
 public:
  explicit Notification(const Stream& stream);
  ~Notification();
  Notification(const Notification&) = delete;
  Notification& operator=(const Notification&) = delete;

 private:
  static Notification& From(OrtSyncNotificationImpl* notification) { return *static_cast<Notification*>(notification); }

  const OrtApi& api_;
  const int gpu_;
  void* const stream_;
  void* const event_;
};

Notification::Notification(const Stream& stream)
    : OrtSyncNotificationImpl{},
      api_(stream.api()),
      gpu_(stream.gpu()),
      stream_(stream.handle()),
      event_(NewEventOf(gpu_)) {
  ort_version_supported = kProviderApi;
  OrtSyncNotificationImpl::Release = [](OrtSyncNotificationImpl* self) noexcept { delete &From(self); };
  Activate = [](OrtSyncNotificationImpl* self) noexcept {
    const Notification& notification = From(self);
    return Guarded(notification.api_, [&]() -> Status {
      const gpu::Selection here(notification.gpu_);
      gpu::Record(notification.event_, notification.stream_);
      return {};
    });
  };
  OrtSyncNotificationImpl::WaitOnDevice = [](OrtSyncNotificationImpl* self, OrtSyncStream* consumer) noexcept {
    const Notification& notification = From(self);
    return Guarded(notification.api_, [&]() -> Status {
      const gpu::Selection here(notification.gpu_);
      gpu::WaitOnDevice(notification.api_.SyncStream_GetHandle(consumer), notification.event_);
      return {};
    });
  };
  OrtSyncNotificationImpl::WaitOnHost = [](OrtSyncNotificationImpl* self) noexcept {
    const Notification& notification = From(self);
    return Guarded(notification.api_, [&]() -> Status {
      gpu::WaitOnHost(notification.event_);
      return {};
    });
  };
}

Notification::~Notification() { gpu::DeleteEvent(event_); }

Stream::Stream(const OrtApi& api, GpuMemory& memory)
    : OrtSyncStreamImpl{}, api_(api), memory_(memory), handle_(NewStreamOf(memory.gpu())) {
  ort_version_supported = kProviderApi;
  OrtSyncStreamImpl::Release = [](OrtSyncStreamImpl* self) noexcept { delete &From(self); };
  GetHandle = [](OrtSyncStreamImpl* self) noexcept { return From(self).handle(); };
  CreateNotification = [](OrtSyncStreamImpl* self, OrtSyncNotificationImpl** notification) noexcept {
    const Stream& stream = From(self);
    return Guarded(stream.api(), [&]() -> Status {
      *notification = std::make_unique<Notification>(stream).release();
      return {};
    });
  };
  Flush = [](OrtSyncStreamImpl* self) noexcept {
    const Stream& stream = From(self);
    return Guarded(stream.api(), [&]() -> Status {
      const gpu::Selection here(stream.gpu());
      gpu::Synchronize(stream.handle());
      return {};
    });
  };
  OnSessionRunEnd = [](OrtSyncStreamImpl*) noexcept -> OrtStatus* { return nullptr; };
}

Stream::~Stream() {
  try {
    const gpu::Selection selection(gpu());
    try {
      gpu::Synchronize(handle_);
    } catch (const gpu::Error&) {
      // A kernel failed: whoever waited for it was told.
    }
    memory_.Forget(handle_);
    gpu::DeleteStream(handle_);
  } catch (const std::exception&) {
    // Without its GPU there is nothing to give back.
  }
}

}  // namespace

void* OwnStream(int gpu) {
  static std::mutex mutex;
  // Never destroyed: nothing can be asked of CUDA when static objects are.
  static auto& streams = *new std::map<int, void*>;
  const std::lock_guard<std::mutex> lock(mutex);
  void*& stream = streams[gpu];
  if (stream == nullptr) stream = NewStreamOf(gpu);
  return stream;
}

GpuMemory::GpuMemory(const OrtApi& api, int gpu, Owned<OrtMemoryInfo> info)
    : OrtAllocator{}, api_(api), gpu_(gpu), info_(std::move(info)) {
  version = kProviderApi;
  Alloc = [](OrtAllocator* self, size_t bytes) noexcept { return static_cast<GpuMemory*>(self)->Take(bytes, nullptr); };
  Reserve = Alloc;
  AllocOnStream = [](OrtAllocator* self, size_t bytes, OrtSyncStream* stream) noexcept {
    auto& memory = *static_cast<GpuMemory*>(self);
    return memory.Take(bytes, stream == nullptr ? nullptr : memory.api_.SyncStream_GetHandle(stream));
  };
  OrtAllocator::Free = [](OrtAllocator* self, void* memory) noexcept {
    static_cast<GpuMemory*>(self)->GiveBack(memory);
  };
  Info = [](const OrtAllocator* self) noexcept -> const OrtMemoryInfo* {
    return static_cast<const GpuMemory*>(self)->info();
  };
}

void* GpuMemory::Take(size_t bytes, void* stream) noexcept {
  if (bytes == 0) return nullptr;
  try {
    const gpu::Selection selection(gpu_);
    void* const order = stream != nullptr ? stream : OwnStream(gpu_);
    void* memory = gpu::Allocate(bytes, order);
    if (memory == nullptr) return nullptr;
    // Whoever does not name a stream may use it on any.
    if (stream == nullptr) gpu::Synchronize(order);
    const std::lock_guard<std::mutex> lock(mutex_);
    stream_of_.emplace(memory, order);
    return memory;
  } catch (const std::exception&) {
    return nullptr;
  }
}

void GpuMemory::GiveBack(void* memory) noexcept {
  if (memory == nullptr) return;
  try {
    const gpu::Selection selection(gpu_);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = stream_of_.find(memory);
    if (found == stream_of_.end()) return;
    // Under the lock, or the stream might end in between.
    gpu::Free(memory, found->second);
    stream_of_.erase(found);
  } catch (const std::exception&) {
    // Without its GPU there is nothing to give back.
  }
}

void GpuMemory::Forget(void* stream) {
  void* const rest = OwnStream(gpu_);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [memory, order] : stream_of_) {
    if (order == stream) order = rest;
  }
}

OrtSyncStreamImpl* NewSyncStream(const OrtApi& api, GpuMemory& memory) { return new Stream(api, memory); }

}  // namespace gradfuse::ort
