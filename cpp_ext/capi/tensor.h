#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "acl/acl.h"
#include "capi/handle_table.h"
#include "gradfuse/tensor.h"

namespace gradfuse::capi {

// What an aclTensor stands for.
struct GivenTensor {
  MutableTensor view;  // from its first element on; without memory, data is null
  aclFormat format = ACL_FORMAT_ND;
};

// What an aclIntArray stands for.
using IntArray = std::shared_ptr<const std::vector<int64_t>>;

using TensorTable = HandleTable<GivenTensor, HandleKind::kTensor>;
using IntArrayTable = HandleTable<IntArray, HandleKind::kIntArray>;

}  // namespace gradfuse::capi
