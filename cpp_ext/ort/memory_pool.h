#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace gradfuse::ort {

// Memory for the values of runs, in one range of addresses, which grows. What is free is given out again, to values of
// any size that fit. What the pool holds beyond the most that was in use at once goes back to the system, but for 16
// MiB.
//
// ONNX Runtime's arena gets memory in pieces that are never joined, and keeps them: values of many sizes leave much of
// it unused. Without the arena each large value is new from the system, which has to clear it.
//
// All functions may be called by several threads at once.
class MemoryPool {
 public:
  // A pool without memory, for as many values as the system then has addresses for; null where it has none.
  static std::unique_ptr<MemoryPool> Create();

  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;
  ~MemoryPool();

  // Aligned to 4,096 bytes; null where nothing free is long enough, and the system has no more addresses behind the
  // pool's, as where they are limited.
  void* Allocate(size_t bytes);

  // `memory` is from Allocate.
  void Free(void* memory);

  bool Contains(const void* memory) const;

  // Returns to the system what is not in use, and until the next value is allocated what is freed after that.
  void Trim();

  // Around fork(): the child has the pool as it is, whatever other threads were about to do with it.
  void Lock();
  void Unlock();

  // Bytes in use, and bytes of memory that the pool holds, in use or not.
  size_t used();
  size_t held();

 private:
  explicit MemoryPool(unsigned char* base);

  struct Page {
    size_t used = 0;  // bytes
    bool held = false;
  };

  bool Grow(size_t bytes);
  void Count(size_t start, size_t bytes, bool used);
  void TrimTo(size_t most);

  unsigned char* const base_;
  std::atomic<size_t> size_;  // of the range
  std::mutex mutex_;
  std::map<size_t, size_t> used_;  // sizes by offset, as the next
  std::map<size_t, size_t> free_;
  std::vector<Page> pages_;
  size_t bytes_used_ = 0;
  size_t most_used_ = 0;
  size_t bytes_held_ = 0;
  bool trimmed_ = false;  // since the last value was allocated
};

}  // namespace gradfuse::ort
