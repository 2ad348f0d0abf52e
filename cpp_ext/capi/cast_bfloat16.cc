#include "gradfuse/ops/cast_bfloat16.h"

#include "aclnnop/aclnn_cast_bfloat16.h"
#include "capi/plan.h"

using Args = gradfuse::CastBfloat16Args;

aclnnStatus aclnnCastBfloat16GetWorkspaceSize(const aclTensor* self, int64_t to, aclTensor* output,
                                              uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {self, output}, [&](Args& args) { args.to = to; }, workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(CastBfloat16)
