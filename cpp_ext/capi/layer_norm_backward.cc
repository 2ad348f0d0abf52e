#include "gradfuse/ops/layer_norm_backward.h"

#include "aclnnop/aclnn_layer_norm_backward.h"
#include "capi/plan.h"

using Args = gradfuse::LayerNormBackwardArgs;

aclnnStatus aclnnLayerNormBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* input,
                                                   const aclTensor* weightOptional, const aclTensor* meanOptional,
                                                   const aclTensor* rstd, int64_t axis, const aclIntArray* outputMask,
                                                   aclTensor* gradInput, aclTensor* gradWeight, aclTensor* gradBias,
                                                   uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradOutput, input, weightOptional, meanOptional, rstd, gradInput, gradWeight, gradBias},
      [&](Args& args) {
        args.axis = axis;
        args.output_mask = gradfuse::capi::ReadNumbers("output_mask", outputMask);
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(LayerNormBackward)
