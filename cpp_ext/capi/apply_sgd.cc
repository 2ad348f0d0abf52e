#include "gradfuse/ops/apply_sgd.h"

#include "aclnnop/aclnn_apply_sgd.h"
#include "capi/plan.h"

using Args = gradfuse::ApplySgdArgs;

aclnnStatus aclnnApplySgdGetWorkspaceSize(const aclTensor* parameter, const aclTensor* gradient,
                                          const aclTensor* learningRate, const aclTensor* momentumBufferOptional,
                                          const aclTensor* gradientScaleOptional, double momentum, double weightDecay,
                                          bool nesterov, aclTensor* newParameter, aclTensor* newMomentumBuffer,
                                          uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__,
      {parameter, gradient, learningRate, momentumBufferOptional, gradientScaleOptional, newParameter,
       newMomentumBuffer},
      [&](Args& args) {
        args.momentum = static_cast<float>(momentum);
        args.weight_decay = static_cast<float>(weightDecay);
        args.nesterov = nesterov ? 1 : 0;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(ApplySgd)
