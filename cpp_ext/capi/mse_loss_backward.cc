#include "gradfuse/ops/mse_loss_backward.h"

#include "aclnnop/aclnn_mse_loss_backward.h"
#include "capi/plan.h"

using Args = gradfuse::MseLossBackwardArgs;

aclnnStatus aclnnMseLossBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* self,
                                                 const aclTensor* target, int64_t reduction, aclTensor* out,
                                                 uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      "aclnnMseLossBackwardGetWorkspaceSize", {gradOutput, self, target, out},
      [&](Args& args) { args.reduction = reduction; }, workspaceSize, executor);
}

aclnnStatus aclnnMseLossBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
  return gradfuse::capi::Execute("aclnnMseLossBackward", Args::kName, workspace, workspaceSize, executor, stream);
}
