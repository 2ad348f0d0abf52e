#include "kernels/cpu/streaming.h"

#include <atomic>
#include <cstdlib>

namespace gradfuse::cpu {
namespace {

constexpr int64_t kStreamBytes = 32 << 20;

std::atomic<int64_t>& Threshold() {
  static std::atomic<int64_t> threshold([] {
    const char* text = std::getenv("GRADFUSE_STREAM_BYTES");
    char* end = nullptr;
    const int64_t bytes = text ? std::strtoll(text, &end, 10) : 0;
    return text != nullptr && end != text && *end == '\0' && bytes >= 0 ? bytes : kStreamBytes;
  }());
  return threshold;
}

}  // namespace

int64_t StreamBytes() { return Threshold().load(std::memory_order_relaxed); }

void SetStreamBytes(int64_t bytes) { Threshold().store(bytes, std::memory_order_relaxed); }

}  // namespace gradfuse::cpu
