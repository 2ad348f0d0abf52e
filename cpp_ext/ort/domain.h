#pragma once

#include <cstdint>

#include "ort/api.h"

namespace gradfuse::ort {

constexpr char kDomain[] = "aclnn";

// Minor version of the oldest ONNX Runtime that has all that custom ops call.
constexpr uint32_t kOldest = 18;
static_assert(ORT_API_VERSION >= kOldest, "onnxruntime_c_api.h is too old");

// The minor version of a runtime of major version 1; 0 for what is no version.
uint32_t MinorVersion(const char* runtime_version);

// The newest API that both the headers of this build and the runtime know.
uint32_t ApiVersion(const char* runtime_version);

// Our domain with all ops, made once for a runtime: sessions refer to it for as long as they live.
OrtCustomOpDomain* DomainFor(const OrtApi& api, uint32_t version);

}  // namespace gradfuse::ort
