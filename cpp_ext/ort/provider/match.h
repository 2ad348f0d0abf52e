#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "ort/provider/gpu.h"

namespace gradfuse::gpu {

// Which of `gpus` each hardware device is that ONNX Runtime found, or -1: by their places on the bus, however they are
// written. `hardware` holds the places of NVIDIA's devices, "" for one that is not known, which is taken for the only
// GPU where it is the only device.
std::vector<int> Match(const std::vector<std::string>& hardware, const std::vector<Info>& gpus);

}  // namespace gradfuse::gpu
