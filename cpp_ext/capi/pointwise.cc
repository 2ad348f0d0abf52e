#include "gradfuse/ops/pointwise.h"

#include "aclnnop/aclnn_pointwise.h"
#include "capi/plan.h"

using Args = gradfuse::PointwiseArgs;

aclnnStatus aclnnPointwiseGetWorkspaceSize(
    const aclTensor* x0, const aclTensor* x1Optional, const aclTensor* x2Optional, const aclTensor* x3Optional,
    const aclTensor* x4Optional, const aclTensor* x5Optional, const aclTensor* x6Optional, const aclTensor* x7Optional,
    const aclTensor* seedOptional, const aclTensor* drawnOptional, char* expressionOptional, int64_t dropoutThreshold,
    int64_t draw, aclTensor* y0, aclTensor* y1, aclTensor* y2, uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__,
      {x0, x1Optional, x2Optional, x3Optional, x4Optional, x5Optional, x6Optional, x7Optional, seedOptional,
       drawnOptional, y0, y1, y2},
      [&](Args& args) {
        if (expressionOptional != nullptr) args.expression = expressionOptional;
        args.dropout_threshold = dropoutThreshold;
        args.draw = draw;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(Pointwise)
