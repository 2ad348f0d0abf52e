#pragma once

#include "gradfuse/macros.h"
#include "gradfuse/signature.h"
#include "gradfuse/status.h"
#include "gradfuse/tensor.h"

// The checks that operators that update parameters share.
namespace gradfuse {

inline Status CheckTensor(const char* name, const Tensor& tensor, const Tensor& parameter) {
  GRADFUSE_EXPECT(tensor.shape == parameter.shape, name, Describe(tensor), Describe(parameter) + ", as parameter");
  return {};
}

inline Status CheckScalar(const char* name, const Tensor& tensor) {
  GRADFUSE_EXPECT(tensor.shape.rank() == 0, name, Describe(tensor), Describe(tensor.dtype, {}));
  return {};
}

}  // namespace gradfuse
