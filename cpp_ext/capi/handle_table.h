#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "capi/shared_mutex.h"

namespace gradfuse::capi {

enum class HandleKind : uintptr_t { kTensor, kIntArray, kExecutor, kStream };

// Objects that C callers refer to by handles. A handle is not an address and is never reused, so that a stale handle,
// or one of another kind, is recognised without a look at freed memory. Handles are odd; pointers to aligned objects
// never are.
//
// From the lowest bit on, a handle is: a one, two bits for its kind, 29 for the slot of the object, and 32 for the
// number of objects that the slot has had.
template <class Object, HandleKind kKind>
class HandleTable {
 public:
  // The table of this process. Lives forever, since threads may outlive static objects.
  static HandleTable& Shared() {
    static HandleTable& table = *new HandleTable;
    return table;
  }

  void* Add(Object object) {
    const std::lock_guard lock(SharedMutex());
    if (free_ == kNone) {
      if (slots_.size() > kLastIndex) throw std::bad_alloc();
      slots_.emplace_back();
      free_ = static_cast<uint32_t>(slots_.size() - 1);
    }
    const uint32_t index = free_;
    Slot& slot = slots_[index];
    slot.object.emplace(std::move(object));
    free_ = slot.next_free;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a handle is no address, and nothing is at it
    return reinterpret_cast<void*>(uintptr_t{slot.generation} << 32 | uintptr_t{index} << kIndexShift | kTag);
  }

  // The object of a handle; null where there is none. The caller holds the shared mutex as long as it looks at it.
  const Object* Find(const void* handle) const {
    const auto bits = reinterpret_cast<uintptr_t>(handle);
    const size_t index = bits >> kIndexShift & kLastIndex;
    if ((bits & kTagMask) != kTag || index >= slots_.size()) return nullptr;
    const Slot& slot = slots_[index];
    return slot.object && slot.generation == bits >> 32 ? &*slot.object : nullptr;
  }

  // Removes and returns the object of a handle, after `accepts`, which may throw, has seen it. Returns nothing if there
  // is no such object.
  template <class Accepts>
  std::optional<Object> Take(const void* handle, const Accepts& accepts) {
    const std::lock_guard lock(SharedMutex());
    const Object* const found = Find(handle);
    if (found == nullptr) return std::nullopt;
    accepts(*found);
    return Release(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(handle) >> kIndexShift & kLastIndex));
  }
  std::optional<Object> Take(const void* handle) {
    return Take(handle, [](const Object&) {});
  }

  void Clear() {
    std::vector<std::optional<Object>> objects;  // destroyed without the mutex
    const std::lock_guard lock(SharedMutex());
    objects.reserve(slots_.size());
    for (uint32_t index = 0; index < slots_.size(); ++index) {
      if (slots_[index].object) objects.push_back(Release(index));
    }
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr int kIndexShift = 3;
  static constexpr uintptr_t kLastIndex = (uintptr_t{1} << 29) - 1;
  static constexpr uintptr_t kTagMask = 7;
  static constexpr uintptr_t kTag = static_cast<uintptr_t>(kKind) << 1 | 1;

  struct Slot {
    std::optional<Object> object;
    uint32_t generation = 1;
    uint32_t next_free = kNone;
  };

  HandleTable() = default;

  std::optional<Object> Release(uint32_t index) {
    Slot& slot = slots_[index];
    std::optional<Object> object = std::move(slot.object);
    slot.object.reset();
    if (++slot.generation != 0) {  // a slot that has given out all its handles stays empty
      slot.next_free = free_;
      free_ = index;
    }
    return object;
  }

  std::deque<Slot> slots_;
  uint32_t free_ = kNone;
};

}  // namespace gradfuse::capi
