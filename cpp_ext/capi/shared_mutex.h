#pragma once

#include <mutex>

namespace gradfuse::capi {

// Guards all that threads share: for moments only, so that one is enough. A child of fork gets all of it as it is
// between two calls.
std::mutex& SharedMutex();

}  // namespace gradfuse::capi
