#pragma once

#include <cstdint>

#include "ort/api.h"

namespace gradfuse::ort {

// A session configuration entry: the session takes memory for large values of runs from the library's pool.
constexpr char kMemoryPoolEntry[] = "gradfuse.memory_pool";

// Lets sessions of `options` take memory from the pool if they have the entry, whatever its value. They stay as they
// are before version 23 of ONNX Runtime's API, and on other systems than Linux.
void UseMemoryPool(const OrtApi& api, uint32_t version, OrtSessionOptions* options);

}  // namespace gradfuse::ort
