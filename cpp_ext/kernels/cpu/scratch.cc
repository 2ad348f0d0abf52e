#include "kernels/cpu/scratch.h"

#include <atomic>
#include <new>

namespace gradfuse::cpu {
namespace {

constexpr std::align_val_t kCacheLine{64};
constexpr size_t kLarge = size_t{64} << 10;

std::atomic<const ScratchSource*> current = nullptr;

}  // namespace

void SetScratchSource(const ScratchSource* source) { current = source; }

void* AllocateFromSource(size_t bytes) {
  const ScratchSource* const source = current;
  return source == nullptr || bytes < kLarge ? nullptr : source->allocate(bytes);
}

bool IsFromSource(const void* memory) {
  const ScratchSource* const source = current;
  return source != nullptr && source->contains(memory);
}

void* AllocateScratch(size_t bytes) {
  void* const memory = AllocateFromSource(bytes);
  return memory != nullptr ? memory : ::operator new(bytes, kCacheLine, std::nothrow);
}

void FreeScratch(void* memory) {
  if (IsFromSource(memory)) {
    current.load()->free(memory);
  } else {
    ::operator delete(memory, kCacheLine);
  }
}

}  // namespace gradfuse::cpu
