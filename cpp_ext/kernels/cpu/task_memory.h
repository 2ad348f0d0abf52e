#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "kernels/cpu/scratch.h"

// Memory that tasks use for a while.
namespace gradfuse::cpu {

constexpr int64_t kMostKept = 4 << 20;

// Zeros for a task, or what was there before, without throwing: null where there is no memory. Of the system's memory
// threads keep up to six pieces for their next tasks, as the first use of new memory costs as much as the work on it.
template <class T>
class TaskMemory {
 public:
  explicit TaskMemory(int64_t count, bool is_zero = true) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    memory_.memory.reset(AllocateFromSource(bytes));
    memory_.bytes = memory_.memory == nullptr ? 0 : bytes;
    for (Piece& piece : Kept()) {
      if (memory_.memory == nullptr && piece.bytes >= bytes) std::swap(memory_, piece);
    }
    if (memory_.memory == nullptr) {
      memory_.memory.reset(AllocateScratch(bytes));
      memory_.bytes = memory_.memory == nullptr ? 0 : bytes;
    }
    if (is_zero && memory_.memory != nullptr) std::fill_n(data(), count, T{});
  }
  ~TaskMemory() {
    if (memory_.bytes > static_cast<size_t>(kMostKept) || IsFromSource(memory_.memory.get())) return;
    for (Piece& piece : Kept()) {
      if (piece.bytes < memory_.bytes) std::swap(memory_, piece);
    }
  }
  TaskMemory(const TaskMemory&) = delete;
  TaskMemory& operator=(const TaskMemory&) = delete;

  T* data() const { return static_cast<T*>(memory_.memory.get()); }

 private:
  struct Piece {
    std::unique_ptr<void, FreeScratchMemory> memory;
    size_t bytes = 0;
  };
  static std::array<Piece, 6>& Kept() {
    static thread_local std::array<Piece, 6> pieces;
    return pieces;
  }

  Piece memory_;
};

// The same, for what cannot go on without: throws std::bad_alloc. Nothing is set.
template <class T>
class KeptMemory : public TaskMemory<T> {
 public:
  explicit KeptMemory(int64_t count) : TaskMemory<T>(count, /*is_zero=*/false) {
    if (this->data() == nullptr) throw std::bad_alloc();
  }
};

}  // namespace gradfuse::cpu
