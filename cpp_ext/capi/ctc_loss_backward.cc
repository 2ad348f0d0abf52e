#include "gradfuse/ops/ctc_loss_backward.h"

#include "aclnnop/aclnn_ctc_loss_backward.h"
#include "capi/plan.h"

using Args = gradfuse::CtcLossBackwardArgs;

aclnnStatus aclnnCtcLossBackwardGetWorkspaceSize(const aclTensor* gradOut, const aclTensor* logProbs,
                                                 const aclTensor* targets, const aclIntArray* inputLengths,
                                                 const aclIntArray* targetLengths, const aclTensor* negLogLikelihood,
                                                 const aclTensor* logAlpha, int64_t blank, bool zeroInfinity,
                                                 aclTensor* out, uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradOut, logProbs, targets, inputLengths, targetLengths, negLogLikelihood, logAlpha, out},
      [&](Args& args) {
        args.blank = blank;
        args.zero_infinity = zeroInfinity;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(CtcLossBackward)
