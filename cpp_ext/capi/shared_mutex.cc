#include "capi/shared_mutex.h"

#include "capi/system.h"

namespace gradfuse::capi {
namespace {

std::mutex& Make() {
  static std::mutex& mutex = *new std::mutex;
  WatchForks([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  return mutex;
}

}  // namespace

std::mutex& SharedMutex() {
  static std::mutex& mutex = Make();
  return mutex;
}

}  // namespace gradfuse::capi
