#include "gradfuse/ops/apply_adam_w.h"

#include "aclnnop/aclnn_apply_adam_w.h"
#include "capi/plan.h"

using Args = gradfuse::ApplyAdamWArgs;

aclnnStatus aclnnApplyAdamWGetWorkspaceSize(const aclTensor* parameter, const aclTensor* gradient,
                                            const aclTensor* expAvg, const aclTensor* expAvgSq,
                                            const aclTensor* learningRate, const aclTensor* step,
                                            const aclTensor* gradientScaleOptional, double beta1, double beta2,
                                            double epsilon, double weightDecay, bool decoupledWeightDecay,
                                            aclTensor* newParameter, aclTensor* newExpAvg, aclTensor* newExpAvgSq,
                                            uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__,
      {parameter, gradient, expAvg, expAvgSq, learningRate, step, gradientScaleOptional, newParameter, newExpAvg,
       newExpAvgSq},
      [&](Args& args) {
        args.beta1 = static_cast<float>(beta1);
        args.beta2 = static_cast<float>(beta2);
        args.epsilon = static_cast<float>(epsilon);
        args.weight_decay = static_cast<float>(weightDecay);
        args.decoupled_weight_decay = decoupledWeightDecay ? 1 : 0;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(ApplyAdamW)
