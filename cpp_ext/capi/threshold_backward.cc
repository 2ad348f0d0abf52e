#include "gradfuse/ops/threshold_backward.h"

#include "aclnnop/aclnn_threshold_backward.h"
#include "capi/plan.h"

using Args = gradfuse::ThresholdBackwardArgs;

aclnnStatus aclnnThresholdBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* self, double threshold,
                                                   aclTensor* gradInput, uint64_t* workspaceSize,
                                                   aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradOutput, self, gradInput}, [&](Args& args) { args.threshold = static_cast<float>(threshold); },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(ThresholdBackward)
