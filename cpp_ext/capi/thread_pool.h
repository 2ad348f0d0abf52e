#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "gradfuse/parallel.h"

namespace gradfuse {

// A ParallelFor on threads that stay: started when work first asks for them, asleep in between. Any number of threads
// may call it at once, tasks too; each works on its own loop, and idle threads help the oldest one.
class ThreadPool final : public ParallelFor {
 public:
  // Of `threads` threads, the caller's own among them.
  explicit ThreadPool(int threads) : threads_(threads) {}
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The pool of this process, of DefaultThreads() threads. Lives forever. A process that fork made has one of its own.
  static ThreadPool& Shared();

  // The environment variable GRADFUSE_NUM_THREADS, or else the number of CPUs that this process may run on.
  static int DefaultThreads();

 protected:
  void Run(int64_t count, Call call, void* body) const override;

 private:
  struct Job;

  void StartWorkers() const;
  void Work() const;

  const int threads_;
  mutable std::mutex mutex_;
  mutable std::condition_variable wake_;  // of workers: there is a job, or all is over
  mutable std::condition_variable done_;  // of callers: a worker has left a job
  mutable std::deque<Job*> jobs_;         // those with tasks that nobody has begun
  mutable std::vector<std::thread> workers_;
  mutable bool started_ = false;
  bool stops_ = false;
};

}  // namespace gradfuse
