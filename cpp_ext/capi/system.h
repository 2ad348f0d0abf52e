#pragma once

#include <cstdint>

// All that the C API needs from an operating system beyond C++, so that no other source names one.
namespace gradfuse::capi {

// How many processors this process may use, at least 1.
int UsableProcessors();

// The number of this process. A child of fork has another.
int64_t ProcessNumber();

// From now on calls these functions around every fork, which Windows does not have; each may be null.
void WatchForks(void (*before)(), void (*in_parent)(), void (*in_child)()) noexcept;

}  // namespace gradfuse::capi
