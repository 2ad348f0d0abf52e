#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ort/custom_op.h"

namespace gradfuse::ort {

// The custom ops of all ops on all devices that this library was built for, appended to `ops`.
void AppendAllCustomOps(const OrtApi& api, uint32_t version, std::vector<std::unique_ptr<CustomOp>>& ops);

}  // namespace gradfuse::ort
