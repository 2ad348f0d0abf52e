#ifndef GRADFUSE_ACLNNOP_ACLNN_CONVOLUTION_H_
#define GRADFUSE_ACLNNOP_ACLNN_CONVOLUTION_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* A convolution over 1 to 3 spatial dimensions, or a transposed one.
 *
 * input: (N, C, ...); weight: (M, C / groups, ...), or transposed (C, M / groups, ...); biasOptional: (M), or null; all
 * one of FLOAT, DOUBLE, FLOAT16 and BF16, or input BF16 beside others of FLOAT or FLOAT16. stride, padding, dilation,
 * outputPadding: one number for all spatial dimensions, or one for each; padding also those at all beginnings, then
 * those at all ends. outputPadding is 0 without transposed. groups: of channels. relu: whether output is at least 0.
 * factorsInBFloat16: whether input and weight are rounded to it; false for DOUBLE.
 * output: (N, M, ...), of the type of input.
 */
aclnnStatus aclnnConvolutionGetWorkspaceSize(const aclTensor* input, const aclTensor* weight,
                                             const aclTensor* biasOptional, const aclIntArray* stride,
                                             const aclIntArray* padding, const aclIntArray* dilation, bool transposed,
                                             const aclIntArray* outputPadding, int64_t groups, bool relu,
                                             bool factorsInBFloat16, aclTensor* output, uint64_t* workspaceSize,
                                             aclOpExecutor** executor);

aclnnStatus aclnnConvolution(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
