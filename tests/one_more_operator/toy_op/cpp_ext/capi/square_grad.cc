#include "gradfuse/ops/square_grad.h"

#include "aclnnop/aclnn_square_grad.h"
#include "capi/plan.h"

using Args = gradfuse::SquareGradArgs;

aclnnStatus aclnnSquareGradGetWorkspaceSize(const aclTensor* grad, const aclTensor* x, double factor, aclTensor* out,
                                            uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {grad, x, out}, [&](Args& args) { args.factor = static_cast<float>(factor); }, workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(SquareGrad)
