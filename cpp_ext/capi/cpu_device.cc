#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "capi/device.h"
#include "capi/error.h"
#include "capi/handle_table.h"
#include "capi/shared_mutex.h"
#include "capi/system.h"
#include "capi/thread_pool.h"

namespace gradfuse::capi {
namespace {

// What a run threw, kept for another thread to hear of.
std::optional<Error> Outcome(const std::function<void()>& run) {
  try {
    run();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ACL_ERROR_FAILURE, error.what());
  }
}

// A queue of runs, done in order by a thread of its own.
class Stream {
 public:
  Stream() : worker_([this] { Work(); }) {}

  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Finishes what is queued.
  ~Stream() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    wake_.notify_one();
    worker_.join();
  }

  // NOLINTNEXTLINE(readability-non-const-parameter): the executor writes to the workspace
  void Push(std::unique_ptr<Executor> executor, char* workspace) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back({std::move(executor), workspace});
    }
    wake_.notify_one();
  }

  void Synchronize() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
    const std::optional<Error> error = std::exchange(error_, std::nullopt);
    if (error) throw Error(*error);
  }

  // A fork leaves the worker behind.
  bool is_of_this_process() const { return process_ == ProcessNumber(); }

 private:
  struct Entry {
    std::unique_ptr<Executor> executor;
    char* workspace;
  };

  void Work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return ends_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Entry entry = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      std::optional<Error> error = Outcome([&] { entry.executor->RunOnCpu(entry.workspace, ThreadPool::Shared()); });
      entry.executor.reset();
      lock.lock();
      busy_ = false;
      if (error && !error_) error_ = std::move(error);
      if (queue_.empty()) idle_.notify_all();
    }
  }

  const int64_t process_ = ProcessNumber();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Entry> queue_;
  bool busy_ = false;
  bool ends_ = false;
  std::optional<Error> error_;  // the first since the last Synchronize
  std::thread worker_;
};

// Memory that Allocate gave, so that mistakes with it are found.
class Memory {
 public:
  void* Allocate(size_t bytes) {
    std::unique_ptr<void, void (*)(void*)> memory(::operator new(bytes, kAlignment), Delete);
    const std::lock_guard lock(SharedMutex());
    blocks_[static_cast<const char*>(memory.get())] = bytes;
    return memory.release();
  }

  void Free(void* memory) {
    {
      const std::lock_guard lock(SharedMutex());
      if (blocks_.erase(static_cast<const char*>(memory)) == 0) {
        throw Error(ACL_ERROR_INVALID_PARAM, "devPtr is no memory of aclrtMalloc, or freed before");
      }
    }
    Delete(memory);
  }

  void ExpectRoom(const char* name, const void* memory, size_t bytes) const {
    const auto* begin = static_cast<const char*>(memory);
    const std::lock_guard lock(SharedMutex());
    const auto after = blocks_.upper_bound(begin);
    const char* const end = after == blocks_.begin() ? nullptr : EndOf(*std::prev(after));
    if (end == nullptr || begin >= end) {
      throw Error(ACL_ERROR_INVALID_PARAM, std::string(name) + " is no memory of the device, as kind says it is");
    }
    const auto room = static_cast<size_t>(end - begin);
    if (bytes > room) {
      throw Error(ACL_ERROR_INVALID_PARAM, "count is " + std::to_string(bytes) + "; expected at most the " +
                                               std::to_string(room) + " bytes that " + name + " has");
    }
  }

 private:
  using Blocks = std::map<const char*, size_t>;

  static constexpr std::align_val_t kAlignment{256};
  static void Delete(void* memory) { ::operator delete(memory, kAlignment); }
  static const char* EndOf(const Blocks::value_type& block) { return block.first + block.second; }

  Blocks blocks_;
};

class Cpu final : public Device {
 public:
  bool is_host() const override { return true; }

  void Set(int32_t id) override { ExpectZero(id); }
  void Reset(int32_t id) override { ExpectZero(id); }

  void* Allocate(size_t bytes) override { return memory_.Allocate(bytes); }
  void Free(void* memory) override { memory_.Free(memory); }
  void Copy(void* to, const void* from, size_t bytes, aclrtMemcpyKind kind) override {
    if (kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE) memory_.ExpectRoom("dst", to, bytes);
    if (kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE)
      memory_.ExpectRoom("src", from, bytes);
    std::memmove(to, from, bytes);
  }

  aclrtStream CreateStream() override { return Streams().Add(std::make_shared<Stream>()); }

  void DestroyStream(aclrtStream handle) override {
    std::optional<std::shared_ptr<Stream>> stream = Streams().Take(handle);
    if (!stream) ThrowNoStream();
    // The worker of a stream of the process that forked this one is not there to be waited for.
    if (!(*stream)->is_of_this_process()) static_cast<void>(new std::shared_ptr<Stream>(std::move(*stream)));
  }

  void Synchronize(aclrtStream handle) override {
    if (handle != nullptr) Find(handle)->Synchronize();
  }

  void ExpectStream(aclrtStream handle) override {
    if (handle != nullptr) Find(handle);
  }

  void Execute(std::unique_ptr<Executor> executor, char* workspace, aclrtStream handle) override {
    if (handle == nullptr) return executor->RunOnCpu(workspace, ThreadPool::Shared());
    Find(handle)->Push(std::move(executor), workspace);
  }

 private:
  using StreamTable = HandleTable<std::shared_ptr<Stream>, HandleKind::kStream>;
  static StreamTable& Streams() { return StreamTable::Shared(); }

  [[noreturn]] static void ThrowNoStream() {
    throw Error(ACL_ERROR_INVALID_PARAM, "stream is unknown or already destroyed; expected one of aclrtCreateStream");
  }
  static std::shared_ptr<Stream> Find(aclrtStream handle) {
    std::shared_ptr<Stream> stream;
    {
      const std::lock_guard lock(SharedMutex());
      if (const auto* found = Streams().Find(handle)) stream = *found;
    }
    if (stream == nullptr) ThrowNoStream();
    if (stream->is_of_this_process()) return stream;
    throw Error(ACL_ERROR_INVALID_PARAM,
                "stream is one of the process that forked this one; expected one made in this one");
  }
  static void ExpectZero(int32_t id) {
    if (id == 0) return;
    throw Error(ACL_ERROR_INVALID_PARAM, "deviceId is " + std::to_string(id) + "; expected 0, the CPU");
  }

  Memory memory_;
};

}  // namespace

Device& CpuDevice() {
  static Device& device = *new Cpu;
  return device;
}

}  // namespace gradfuse::capi
