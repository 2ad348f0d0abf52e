#pragma once

#include <cstddef>
#include <cstdint>

namespace gradfuse {

// Spreads the tasks of a kernel over the caller's threads.
// A kernel divides its work by the shapes alone, never by the number of threads, so that results are bit-identical for
// any number of them.
class ParallelFor {
 public:
  virtual ~ParallelFor() = default;

  // Calls task(0), ..., task(count - 1), once each, in any order and perhaps at the same time; returns when all are
  // done. Tasks must not throw. `cost` is the work of all of them together in bytes moved. Work too small to be worth
  // waking a thread stays on the caller's.
  template <class Task>
  void operator()(int64_t count, int64_t cost, const Task& task) const {
    if (count <= 1 || cost < kMinCost) {
      for (int64_t index = 0; index < count; ++index) task(index);
      return;
    }
    Run(
        count, [](void* body, size_t index) { (*static_cast<const Task*>(body))(static_cast<int64_t>(index)); },
        const_cast<Task*>(&task));  // NOLINT(*-const-cast): for C, which knows no const; the call adds it again
  }

 protected:
  using Call = void (*)(void* body, size_t index);
  virtual void Run(int64_t count, Call call, void* body) const = 0;

 private:
  static constexpr int64_t kMinCost = 256 << 10;
};

}  // namespace gradfuse
