#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/device/device_api.h"

int gradfuse_device_name(char* text, size_t size) {
  std::snprintf(text, size, "SIMT machine of the tests");
  return 0;
}

// As aligned as cudaMalloc's, and exactly as large as asked for: the address sanitizer watches what follows.
void* gradfuse_device_allocate(size_t bytes) {
  void* memory = nullptr;
  return posix_memalign(&memory, 256, bytes) == 0 ? memory : nullptr;
}

int gradfuse_device_free(void* memory) {
  std::free(memory);
  return 0;
}

int gradfuse_device_upload(void* device, const void* host, size_t bytes) {
  std::memcpy(device, host, bytes);
  return 0;
}

int gradfuse_device_download(void* host, const void* device, size_t bytes) {
  std::memcpy(host, device, bytes);
  return 0;
}

int gradfuse_device_fill(void* device, int byte, size_t bytes) {
  std::memset(device, byte, bytes);
  return 0;
}

int gradfuse_device_copy(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return 0;
}

int gradfuse_device_synchronize() { return 0; }

namespace {
using Clock = std::chrono::steady_clock;
}

void* gradfuse_device_event() { return new Clock::time_point; }

int gradfuse_device_record(void* event) {
  *static_cast<Clock::time_point*>(event) = Clock::now();
  return 0;
}

int gradfuse_device_elapsed(void* first, void* last, float* milliseconds) {
  const auto time = *static_cast<Clock::time_point*>(last) - *static_cast<Clock::time_point*>(first);
  *milliseconds = std::chrono::duration<float, std::milli>(time).count();
  return 0;
}
