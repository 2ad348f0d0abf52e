#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "ort/provider/gpu.h"

namespace gradfuse::gpu {

// For each hardware device that ONNX Runtime found, its index in `gpus`, or -1. Devices are matched by their places on
// the PCI bus, however these are written. `hardware` holds the places of NVIDIA's devices, or "" for an unknown one,
// which matches the only GPU if it is the only device.
std::vector<int> Match(const std::vector<std::string>& hardware, const std::vector<Info>& gpus);

}  // namespace gradfuse::gpu
