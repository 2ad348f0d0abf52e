#include "gradfuse/ops/ctc_loss.h"

#include "aclnnop/aclnn_ctc_loss.h"
#include "capi/plan.h"

using Args = gradfuse::CtcLossArgs;

aclnnStatus aclnnCtcLossGetWorkspaceSize(const aclTensor* logProbs, const aclTensor* targets,
                                         const aclIntArray* inputLengths, const aclIntArray* targetLengths,
                                         int64_t blank, bool zeroInfinity, aclTensor* negLogLikelihood,
                                         aclTensor* logAlpha, uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {logProbs, targets, inputLengths, targetLengths, negLogLikelihood, logAlpha},
      [&](Args& args) {
        args.blank = blank;
        args.zero_infinity = zeroInfinity;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(CtcLoss)
