#include "capi/system.h"

#include <algorithm>
#include <thread>

#if defined(_WIN32)
#include <windows.h>
#else
#include <pthread.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace gradfuse::capi {

int UsableProcessors() {
#if defined(__linux__)
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus) == 0) return std::max(1, CPU_COUNT(&cpus));
#elif defined(_WIN32)
  // Both masks are 0 where the process runs on more than one group of 64 processors.
  DWORD_PTR usable = 0, present = 0;
  if (GetProcessAffinityMask(GetCurrentProcess(), &usable, &present) && usable != 0) {
    return __builtin_popcountll(usable);
  }
#endif
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

#if defined(_WIN32)
int64_t ProcessNumber() { return GetCurrentProcessId(); }

void WatchForks(void (*)(), void (*)(), void (*)()) noexcept {}
#else
int64_t ProcessNumber() { return getpid(); }

void WatchForks(void (*before)(), void (*in_parent)(), void (*in_child)()) noexcept {
  pthread_atfork(before, in_parent, in_child);
}
#endif

}  // namespace gradfuse::capi
