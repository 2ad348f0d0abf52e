#ifndef GRADFUSE_ACLNNOP_ACLNN_MAX_POOL_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_MAX_POOL_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of maximum pooling over 1 to 3 spatial dimensions. The maxima are found again: of equal ones of a window the
 * first gets its gradient, of NaN the last.
 *
 * gradOutput: (N, C, ...), an element for each window; input: (N, C, ...); both one of FLOAT, DOUBLE, FLOAT16 and BF16.
 * kernelSize, stride, padding, dilation: one number for all spatial dimensions, or one for each; padding also those at
 *     all beginnings, then those at all ends. It is less than a window reaches.
 * ceilMode: whether the last window may reach beyond the padding.
 * gradInput: of the type and shape of input.
 */
aclnnStatus aclnnMaxPoolBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* input,
                                                 const aclIntArray* kernelSize, const aclIntArray* stride,
                                                 const aclIntArray* padding, const aclIntArray* dilation, bool ceilMode,
                                                 aclTensor* gradInput, uint64_t* workspaceSize,
                                                 aclOpExecutor** executor);

aclnnStatus aclnnMaxPoolBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
