#include "gradfuse/ops/convolution.h"

#include "aclnnop/aclnn_convolution.h"
#include "capi/plan.h"

using Args = gradfuse::ConvolutionArgs;

aclnnStatus aclnnConvolutionGetWorkspaceSize(const aclTensor* input, const aclTensor* weight,
                                             const aclTensor* biasOptional, const aclIntArray* stride,
                                             const aclIntArray* padding, const aclIntArray* dilation, bool transposed,
                                             const aclIntArray* outputPadding, int64_t groups, bool relu,
                                             bool factorsInBFloat16, aclTensor* output, uint64_t* workspaceSize,
                                             aclOpExecutor** executor) {
  using gradfuse::capi::ReadNumbers;
  return gradfuse::capi::Prepare<Args>(
      __func__, {input, weight, biasOptional, output},
      [&](Args& args) {
        args.stride = ReadNumbers("stride", stride);
        args.padding = ReadNumbers("padding", padding);
        args.dilation = ReadNumbers("dilation", dilation);
        args.transposed = transposed;
        args.output_padding = ReadNumbers("output_padding", outputPadding);
        args.groups = groups;
        args.relu = relu;
        args.factors_in_bfloat16 = factorsInBFloat16;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(Convolution)
