#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradfuse::cpu {

// Operators that move at least this many bytes write their results around the caches (streaming stores). Results of
// that size would be evicted before anyone reads them, and a streaming store need not read the line first. The
// environment variable GRADFUSE_STREAM_BYTES overrides the number; it is read once.
int64_t StreamBytes();

// Changes the number from now on.
void SetStreamBytes(int64_t bytes);

// Streaming stores are not ordered. This fences them when a thread is done writing, before another thread may read.
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
