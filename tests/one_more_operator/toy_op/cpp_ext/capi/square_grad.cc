#include "gradfuse/ops/square_grad.h"

#include "aclnnop/aclnn_square_grad.h"
#include "capi/plan.h"

using Args = gradfuse::SquareGradArgs;

aclnnStatus aclnnSquareGradGetWorkspaceSize(const aclTensor* grad, const aclTensor* x, double factor, aclTensor* out,
                                            uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      "aclnnSquareGradGetWorkspaceSize", {grad, x, out}, [&](Args& args) { args.factor = static_cast<float>(factor); },
      workspaceSize, executor);
}

aclnnStatus aclnnSquareGrad(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
  return gradfuse::capi::Execute("aclnnSquareGrad", Args::kName, workspace, workspaceSize, executor, stream);
}
