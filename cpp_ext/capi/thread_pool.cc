#include "capi/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <system_error>

#include "capi/system.h"

namespace gradfuse {
namespace {

constexpr int kMaxThreads = 1024;

std::atomic<ThreadPool*> shared{nullptr};

// A child of fork has none of the threads of its parent, and perhaps a lock that one of them held.
[[maybe_unused]] const bool fork_is_watched = []() noexcept {
  capi::WatchForks(nullptr, nullptr, [] { shared.store(nullptr); });
  return true;
}();

}  // namespace

// A loop: on its caller's stack, which the caller leaves when no worker is at it.
struct ThreadPool::Job {
  Call call;
  void* body;
  int64_t count;
  std::atomic<int64_t> next{0};
  int workers = 0;  // guarded by mutex_

  // Does tasks until each has been begun.
  void Work() {
    for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      call(body, static_cast<size_t>(index));
    }
  }
};

ThreadPool& ThreadPool::Shared() {
  ThreadPool* pool = shared.load();
  if (pool != nullptr) return *pool;
  auto made = std::make_unique<ThreadPool>(DefaultThreads());
  if (shared.compare_exchange_strong(pool, made.get())) pool = made.release();
  return *pool;
}

int ThreadPool::DefaultThreads() {
  if (const char* text = std::getenv("GRADFUSE_NUM_THREADS")) {
    const int64_t threads = std::strtoll(text, nullptr, 10);
    if (threads >= 1) return static_cast<int>(std::min<int64_t>(threads, kMaxThreads));
  }
  return capi::UsableProcessors();
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::StartWorkers() const {
  if (started_) return;
  started_ = true;
  try {
    for (int thread = 1; thread < threads_; ++thread) workers_.emplace_back([this] { Work(); });
  } catch (const std::system_error&) {
    // No more threads to be had: those that are there do the work.
  }
}

void ThreadPool::Work() const {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stops_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job* const job = jobs_.front();
    ++job->workers;
    lock.unlock();
    job->Work();
    lock.lock();
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
    if (--job->workers == 0) done_.notify_all();
  }
}

void ThreadPool::Run(int64_t count, Call call, void* body) const {
  Job job{call, body, count};
  if (threads_ == 1) return job.Work();
  {
    const std::lock_guard lock(mutex_);
    StartWorkers();
    jobs_.push_back(&job);
  }
  wake_.notify_all();
  job.Work();
  std::unique_lock lock(mutex_);
  jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
  done_.wait(lock, [&] { return job.workers == 0; });
}

}  // namespace gradfuse
