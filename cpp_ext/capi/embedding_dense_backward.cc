#include "gradfuse/ops/embedding_dense_backward.h"

#include "aclnnop/aclnn_embedding_dense_backward.h"
#include "capi/plan.h"

using Args = gradfuse::EmbeddingDenseBackwardArgs;

aclnnStatus aclnnEmbeddingDenseBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* indices,
                                                        int64_t numWeights, int64_t paddingIdx, bool scaleGradByFreq,
                                                        aclTensor* out, uint64_t* workspaceSize,
                                                        aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradOutput, indices, out},
      [&](Args& args) {
        args.num_weights = numWeights;
        args.padding_idx = paddingIdx;
        args.scale_grad_by_freq = scaleGradByFreq ? 1 : 0;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(EmbeddingDenseBackward)
