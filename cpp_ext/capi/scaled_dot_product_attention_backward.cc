#include "gradfuse/ops/scaled_dot_product_attention_backward.h"

#include "aclnnop/aclnn_scaled_dot_product_attention_backward.h"
#include "capi/plan.h"

using Args = gradfuse::ScaledDotProductAttentionBackwardArgs;

aclnnStatus aclnnScaledDotProductAttentionBackwardGetWorkspaceSize(
    const aclTensor* gradOutput, const aclTensor* query, const aclTensor* key, const aclTensor* value,
    const aclTensor* output, const aclTensor* logsumexp, const aclTensor* attnMaskOptional,
    const aclTensor* seedOptional, const aclTensor* drawnOptional, double scale, int64_t causal,
    int64_t dropoutThreshold, int64_t draw, aclTensor* gradQuery, aclTensor* gradKey, aclTensor* gradValue,
    uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__,
      {gradOutput, query, key, value, output, logsumexp, attnMaskOptional, seedOptional, drawnOptional, gradQuery,
       gradKey, gradValue},
      [&](Args& args) {
        args.scale = static_cast<float>(scale);
        args.causal = causal;
        args.dropout_threshold = dropoutThreshold;
        args.draw = draw;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(ScaledDotProductAttentionBackward)
