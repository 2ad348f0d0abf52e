#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "capi/shared_mutex.h"

namespace gradfuse::capi {

// Objects that C callers know by handles. A handle is never used a second time, so that one whose object is gone is
// known for what it is. Handles are odd, as no pointer to an aligned object is.
template <class Object>
class HandleTable {
 public:
  // The table of this process. Lives forever, as threads may outlive what else there is.
  static HandleTable& Shared() {
    static HandleTable& table = *new HandleTable;
    return table;
  }

  void* Add(Object object) {
    const std::lock_guard lock(SharedMutex());
    next_ += 2;
    objects_.emplace(next_, std::move(object));
    return reinterpret_cast<void*>(next_);
  }

  // Calls body with the object of a handle, under the shared mutex; false where there is none.
  template <class Body>
  bool With(const void* handle, const Body& body) {
    const std::lock_guard lock(SharedMutex());
    const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    if (found == objects_.end()) return false;
    body(found->second);
    return true;
  }

  // Takes the object of a handle out of the table; a default one where there is none, or where `accepts` gives false.
  template <class Accepts>
  Object Take(const void* handle, const Accepts& accepts) {
    const std::lock_guard lock(SharedMutex());
    const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    if (found == objects_.end() || !accepts(found->second)) return Object();
    Object object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

  void Clear() {
    std::unordered_map<uintptr_t, Object> objects;
    const std::lock_guard lock(SharedMutex());
    objects.swap(objects_);
  }

 private:
  HandleTable() = default;

  std::unordered_map<uintptr_t, Object> objects_;
  uintptr_t next_ = (uintptr_t{1} << 32) + 1;
};

}  // namespace gradfuse::capi
