#include "gradfuse/ops/mse_loss_backward.h"

#include "aclnnop/aclnn_mse_loss_backward.h"
#include "capi/plan.h"

using Args = gradfuse::MseLossBackwardArgs;

aclnnStatus aclnnMseLossBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* self,
                                                 const aclTensor* target, int64_t reduction, aclTensor* out,
                                                 uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradOutput, self, target, out}, [&](Args& args) { args.reduction = reduction; }, workspaceSize,
      executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(MseLossBackward)
