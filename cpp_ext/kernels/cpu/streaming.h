#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradfuse::cpu {

// An operator that moves at least so many bytes writes its results around the caches: they would not stay there until
// somebody reads them, and a line need not be read before it is written. The environment variable
// GRADFUSE_STREAM_BYTES says another number; it is read once.
int64_t StreamBytes();

// Another number from now on.
void SetStreamBytes(int64_t bytes);

// At the end of what a thread has written around the caches, before another one may read it: such stores keep no order.
class StreamFence {
 public:
  explicit StreamFence(bool streams) : streams_(streams) {}
  ~StreamFence() {
#if defined(__x86_64__)
    if (streams_) _mm_sfence();
#endif
  }
  StreamFence(const StreamFence&) = delete;
  StreamFence& operator=(const StreamFence&) = delete;

 private:
  [[maybe_unused]] bool streams_;
};

}  // namespace gradfuse::cpu
