#include "gradfuse/ops/linear_cross_entropy.h"

#include "aclnnop/aclnn_linear_cross_entropy.h"
#include "capi/plan.h"

using Args = gradfuse::LinearCrossEntropyArgs;

aclnnStatus aclnnLinearCrossEntropyGetWorkspaceSize(
    const aclTensor* input, const aclTensor* linearWeight, const aclTensor* target, const aclTensor* linearBiasOptional,
    const aclTensor* weightOptional, const aclTensor* gradLossOptional, const aclTensor* gradLogsumexpOptional,
    char* reductionOptional, int64_t ignoreIndex, double labelSmoothing, double softcap, const aclIntArray* outputMask,
    aclTensor* loss, aclTensor* gradInput, aclTensor* gradWeight, aclTensor* gradBias, aclTensor* logsumexp,
    uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__,
      {input, linearWeight, target, linearBiasOptional, weightOptional, gradLossOptional, gradLogsumexpOptional, loss,
       gradInput, gradWeight, gradBias, logsumexp},
      [&](Args& args) {
        if (reductionOptional != nullptr) args.reduction = reductionOptional;
        args.ignore_index = ignoreIndex;
        args.label_smoothing = static_cast<float>(labelSmoothing);
        args.softcap = static_cast<float>(softcap);
        args.output_mask = gradfuse::capi::ReadNumbers("output_mask", outputMask);
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(LinearCrossEntropy)
