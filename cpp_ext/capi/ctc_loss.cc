#include "gradfuse/ops/ctc_loss.h"

#include "aclnnop/aclnn_ctc_loss.h"
#include "capi/plan.h"

using Args = gradfuse::CtcLossArgs;

aclnnStatus aclnnCtcLossGetWorkspaceSize(const aclTensor* logProbs, const aclTensor* targets,
                                         const aclIntArray* inputLengths, const aclIntArray* targetLengths,
                                         int64_t blank, bool zeroInfinity, aclTensor* negLogLikelihood,
                                         aclTensor* logAlpha, uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      "aclnnCtcLossGetWorkspaceSize", {logProbs, targets, inputLengths, targetLengths, negLogLikelihood, logAlpha},
      [&](Args& args) {
        args.blank = blank;
        args.zero_infinity = zeroInfinity;
      },
      workspaceSize, executor);
}

aclnnStatus aclnnCtcLoss(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
  return gradfuse::capi::Execute("aclnnCtcLoss", Args::kName, workspace, workspaceSize, executor, stream);
}
