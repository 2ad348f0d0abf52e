#include "gradfuse/ops/grouped_bias_add_grad.h"

#include "aclnnop/aclnn_grouped_bias_add_grad.h"
#include "capi/plan.h"

using Args = gradfuse::GroupedBiasAddGradArgs;

aclnnStatus aclnnGroupedBiasAddGradGetWorkspaceSize(const aclTensor* gradY, const aclTensor* groupIdxOptional,
                                                    aclTensor* out, uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradY, groupIdxOptional, out},
      [&](Args&) {

      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(GroupedBiasAddGrad)
