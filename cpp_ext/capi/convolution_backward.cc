#include "gradfuse/ops/convolution_backward.h"

#include "aclnnop/aclnn_convolution_backward.h"
#include "capi/plan.h"

using Args = gradfuse::ConvolutionBackwardArgs;

aclnnStatus aclnnConvolutionBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* input,
                                                     const aclTensor* weight, const aclIntArray* stride,
                                                     const aclIntArray* padding, const aclIntArray* dilation,
                                                     bool transposed, const aclIntArray* outputPadding, int64_t groups,
                                                     const aclIntArray* outputMask, bool factorsInBFloat16,
                                                     aclTensor* gradInput, aclTensor* gradWeight, aclTensor* gradBias,
                                                     uint64_t* workspaceSize, aclOpExecutor** executor) {
  using gradfuse::capi::ReadNumbers;
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradOutput, input, weight, gradInput, gradWeight, gradBias},
      [&](Args& args) {
        args.stride = ReadNumbers("stride", stride);
        args.padding = ReadNumbers("padding", padding);
        args.dilation = ReadNumbers("dilation", dilation);
        args.transposed = transposed;
        args.output_padding = ReadNumbers("output_padding", outputPadding);
        args.groups = groups;
        args.output_mask = ReadNumbers("output_mask", outputMask);
        args.factors_in_bfloat16 = factorsInBFloat16;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(ConvolutionBackward)
