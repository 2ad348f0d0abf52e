#pragma once

#include <cstdint>

#include "ort/api.h"
#include "ort/provider/api.h"

namespace gradfuse::ort {

// What users select, and what nodes that run on it say.
constexpr char kProviderName[] = "GradfuseCudaExecutionProvider";
// The option of a session that says on which GPU the provider runs. ONNX Runtime sets it for the device that was
// chosen.
constexpr char kOptionPrefix[] = "ep.gradfusecudaexecutionprovider.";
constexpr char kGpuKey[] = "cuda_device";
constexpr uint32_t kNvidia = 0x10DE;  // vendor of the GPUs and of their memory

// The factory of the provider, for one registration of the library. `logger` lives as long as the environment.
// Throws OrtError.
OrtEpFactory* NewProviderFactory(const OrtApi& api, uint32_t version, const OrtLogger* logger);
void DeleteProviderFactory(OrtEpFactory* factory);

}  // namespace gradfuse::ort
