#include "gradfuse/ops/gelu_backward.h"

#include "aclnnop/aclnn_gelu_backward.h"
#include "capi/plan.h"

using Args = gradfuse::GeluBackwardArgs;

aclnnStatus aclnnGeluBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* self,
                                              char* approximateOptional, aclTensor* gradInput, uint64_t* workspaceSize,
                                              aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradOutput, self, gradInput},
      [&](Args& args) {
        if (approximateOptional != nullptr) args.approximate = approximateOptional;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(GeluBackward)
