#ifndef GRADFUSE_ACLNNOP_ACLNN_CONVOLUTION_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_CONVOLUTION_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradients of a convolution over 1 to 3 spatial dimensions, or of a transposed one.
 *
 * gradOutput: (N, M, ...); input: (N, C, ...); weight: (M, C / groups, ...), or transposed (C, M / groups, ...); all
 * one of FLOAT, DOUBLE, FLOAT16 and BF16, or gradOutput and input BF16 beside weight of FLOAT or FLOAT16. stride,
 * padding, dilation, outputPadding: one number for all spatial dimensions, or one for each; padding also those at all
 * beginnings, then those at all ends. outputPadding is 0 without transposed. groups: of channels. outputMask: three
 * numbers, 0 or 1: which of the three gradients are wanted. factorsInBFloat16: whether what is multiplied is rounded to
 * it; false for DOUBLE. gradInput, gradWeight: of the type and shape of input and weight; gradBias: (M), of the type of
 * weight. A gradient that is not wanted has shape (0).
 */
aclnnStatus aclnnConvolutionBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* input,
                                                     const aclTensor* weight, const aclIntArray* stride,
                                                     const aclIntArray* padding, const aclIntArray* dilation,
                                                     bool transposed, const aclIntArray* outputPadding, int64_t groups,
                                                     const aclIntArray* outputMask, bool factorsInBFloat16,
                                                     aclTensor* gradInput, aclTensor* gradWeight, aclTensor* gradBias,
                                                     uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnConvolutionBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                     aclrtStream stream);

ACL_END_DECLS

#endif
