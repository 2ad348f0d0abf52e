#include "gradfuse/ops/cross_entropy_loss_grad.h"

#include "aclnnop/aclnn_cross_entropy_loss_grad.h"
#include "capi/plan.h"

using Args = gradfuse::CrossEntropyLossGradArgs;

aclnnStatus aclnnCrossEntropyLossGradGetWorkspaceSize(const aclTensor* gradLoss, const aclTensor* logProb,
                                                      const aclTensor* target, const aclTensor* weightOptional,
                                                      const aclTensor* gradZlossOptional,
                                                      const aclTensor* lseForZlossOptional, char* reductionOptional,
                                                      int64_t ignoreIndex, double labelSmoothing,
                                                      double lseSquareScaleForZloss, const aclTensor* out,
                                                      uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradLoss, logProb, target, weightOptional, gradZlossOptional, lseForZlossOptional, out},
      [&](Args& args) {
        if (reductionOptional != nullptr) args.reduction = reductionOptional;
        args.ignore_index = ignoreIndex;
        args.label_smoothing = static_cast<float>(labelSmoothing);
        args.lse_square_scale_for_zloss = static_cast<float>(lseSquareScaleForZloss);
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(CrossEntropyLossGrad)
