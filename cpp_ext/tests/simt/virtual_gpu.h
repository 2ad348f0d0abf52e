#pragma once

#include <cstdint>

namespace gradfuse::gpu {

// Whether `memory` is that of a virtual GPU.
bool IsVirtual(const void* memory);

}  // namespace gradfuse::gpu

extern "C" {

struct GradfuseVirtualGpuCounts {
  int64_t host_to_device;  // copies
  int64_t device_to_host;
  int64_t device_to_device;
  int64_t kernels;
  int64_t blocks_in_use;  // of memory
  int64_t streams;        // that exist
  int64_t events;
};

// What a virtual GPU has done since the program began.
void gradfuse_virtual_gpu_counts(int gpu, GradfuseVirtualGpuCounts* counts);
}
