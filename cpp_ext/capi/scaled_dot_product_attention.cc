#include "gradfuse/ops/scaled_dot_product_attention.h"

#include "aclnnop/aclnn_scaled_dot_product_attention.h"
#include "capi/plan.h"

using Args = gradfuse::ScaledDotProductAttentionArgs;

aclnnStatus aclnnScaledDotProductAttentionGetWorkspaceSize(const aclTensor* query, const aclTensor* key,
                                                           const aclTensor* value, const aclTensor* attnMaskOptional,
                                                           const aclTensor* seedOptional,
                                                           const aclTensor* drawnOptional, double scale, int64_t causal,
                                                           int64_t dropoutThreshold, int64_t draw, aclTensor* output,
                                                           aclTensor* logsumexp, uint64_t* workspaceSize,
                                                           aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {query, key, value, attnMaskOptional, seedOptional, drawnOptional, output, logsumexp},
      [&](Args& args) {
        args.scale = static_cast<float>(scale);
        args.causal = causal;
        args.dropout_threshold = dropoutThreshold;
        args.draw = draw;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(ScaledDotProductAttention)
