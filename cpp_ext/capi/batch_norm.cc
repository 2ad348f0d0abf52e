#include "gradfuse/ops/batch_norm.h"

#include "aclnnop/aclnn_batch_norm.h"
#include "capi/plan.h"

using Args = gradfuse::BatchNormArgs;

aclnnStatus aclnnBatchNormGetWorkspaceSize(const aclTensor* input, const aclTensor* weightOptional,
                                           const aclTensor* biasOptional, const aclTensor* runningMeanOptional,
                                           const aclTensor* runningVarOptional, double momentum, double eps, bool relu,
                                           aclTensor* output, aclTensor* saveMean, aclTensor* saveInvstd,
                                           aclTensor* newRunningMean, aclTensor* newRunningVar, uint64_t* workspaceSize,
                                           aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__,
      {input, weightOptional, biasOptional, runningMeanOptional, runningVarOptional, output, saveMean, saveInvstd,
       newRunningMean, newRunningVar},
      [&](Args& args) {
        args.momentum = static_cast<float>(momentum);
        args.eps = static_cast<float>(eps);
        args.relu = relu;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(BatchNorm)
