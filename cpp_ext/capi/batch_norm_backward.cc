#include "gradfuse/ops/batch_norm_backward.h"

#include "aclnnop/aclnn_batch_norm_backward.h"
#include "capi/plan.h"

using Args = gradfuse::BatchNormBackwardArgs;

aclnnStatus aclnnBatchNormBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* input,
                                                   const aclTensor* weightOptional, const aclTensor* saveMean,
                                                   const aclTensor* saveInvstd, const aclTensor* reluOutputOptional,
                                                   const aclIntArray* outputMask, aclTensor* gradInput,
                                                   aclTensor* gradWeight, aclTensor* gradBias, uint64_t* workspaceSize,
                                                   aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__,
      {gradOutput, input, weightOptional, saveMean, saveInvstd, reluOutputOptional, gradInput, gradWeight, gradBias},
      [&](Args& args) { args.output_mask = gradfuse::capi::ReadNumbers("output_mask", outputMask); }, workspaceSize,
      executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(BatchNormBackward)
