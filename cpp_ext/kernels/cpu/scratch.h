#pragma once

#include <cstddef>

// Memory that kernels take for the time of a call.
namespace gradfuse::cpu {

// Where large pieces come from: a runtime's pool of memory for values, so that what a kernel is done with serves values
// and other kernels. Its functions may be called by several threads at once.
struct ScratchSource {
  void* (*allocate)(size_t bytes);  // aligned to 64 bytes; null where it has none
  bool (*contains)(const void* memory);
  void (*free)(void* memory);
};

// `source` lives as long as the process. Without one all pieces are the system's.
void SetScratchSource(const ScratchSource* source);

// Memory of the source for a large piece, not set to anything; null where it is small, or there is none.
void* AllocateFromSource(size_t bytes);

bool IsFromSource(const void* memory);

// Memory of the source or the system, aligned to 64 bytes; null where there is none.
void* AllocateScratch(size_t bytes);

void FreeScratch(void* memory);

struct FreeScratchMemory {
  void operator()(void* memory) const { FreeScratch(memory); }
};

}  // namespace gradfuse::cpu
