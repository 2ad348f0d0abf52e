#pragma once

#include <mutex>

namespace gradfuse::capi {

// Guards everything that threads share. It is held for moments only, so one mutex is enough. A child of fork gets the
// state as it is between two calls.
std::mutex& SharedMutex();

}  // namespace gradfuse::capi
