#pragma once

#include <cstdint>
#include <memory>

#include "ort/custom_op.h"

namespace gradfuse::ort {

// OptimizationBarrier, on the CPU: its output is its first input, a scalar of float32, and there once all inputs are.
//
// Whatever ONNX Runtime's optimizer makes of a graph, what depends on the output runs after all that the inputs depend
// on, as with XLA's op of this name. No file has it: TrainingSession puts it ahead of updates in place.
std::unique_ptr<CustomOp> MakeOptimizationBarrier(const OrtApi& api, uint32_t version);

}  // namespace gradfuse::ort
