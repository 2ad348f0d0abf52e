#include "gradfuse/ops/max_pool_backward.h"

#include "aclnnop/aclnn_max_pool_backward.h"
#include "capi/plan.h"

using Args = gradfuse::MaxPoolBackwardArgs;

aclnnStatus aclnnMaxPoolBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* input,
                                                 const aclIntArray* kernelSize, const aclIntArray* stride,
                                                 const aclIntArray* padding, const aclIntArray* dilation, bool ceilMode,
                                                 aclTensor* gradInput, uint64_t* workspaceSize,
                                                 aclOpExecutor** executor) {
  using gradfuse::capi::ReadNumbers;
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradOutput, input, gradInput},
      [&](Args& args) {
        args.kernel_size = ReadNumbers("kernel_size", kernelSize);
        args.stride = ReadNumbers("stride", stride);
        args.padding = ReadNumbers("padding", padding);
        args.dilation = ReadNumbers("dilation", dilation);
        args.ceil_mode = ceilMode ? 1 : 0;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(MaxPoolBackward)
