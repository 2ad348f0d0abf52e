#pragma once

#include <vector>

#include "acl/acl.h"
#include "gradfuse/tensor.h"

struct aclTensor {
  gradfuse::Tensor view;  // data is that of the first element; null where the tensor has no memory
  aclFormat format = ACL_FORMAT_ND;
};

struct aclIntArray {
  std::vector<int64_t> values;
};
