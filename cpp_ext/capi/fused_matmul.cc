#include "gradfuse/ops/fused_matmul.h"

#include "aclnnop/aclnn_fused_matmul.h"
#include "capi/plan.h"

using Args = gradfuse::FusedMatmulArgs;

aclnnStatus aclnnFusedMatmulGetWorkspaceSize(const aclTensor* a, const aclTensor* b, const aclTensor* bias, bool transA,
                                             bool transB, bool factorsInBFloat16, aclTensor* output,
                                             uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {a, b, bias, output},
      [&](Args& args) {
        args.trans_a = transA ? 1 : 0;
        args.trans_b = transB ? 1 : 0;
        args.factors_in_bfloat16 = factorsInBFloat16 ? 1 : 0;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(FusedMatmul)
