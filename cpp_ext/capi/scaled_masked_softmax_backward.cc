#include "gradfuse/ops/scaled_masked_softmax_backward.h"

#include "aclnnop/aclnn_scaled_masked_softmax_backward.h"
#include "capi/plan.h"

using Args = gradfuse::ScaledMaskedSoftmaxBackwardArgs;

aclnnStatus aclnnScaledMaskedSoftmaxBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* y,
                                                             const aclTensor* mask, double scale, bool fixTriuMask,
                                                             aclTensor* out, uint64_t* workspaceSize,
                                                             aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradOutput, y, mask, out},
      [&](Args& args) {
        args.scale = static_cast<float>(scale);
        args.fix_triu_mask = fixTriuMask;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(ScaledMaskedSoftmaxBackward)
