#ifndef GRADFUSE_ACLNNOP_ACLNN_SCALED_MASKED_SOFTMAX_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_SCALED_MASKED_SOFTMAX_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of y = softmax(scale x, masked) with respect to x: with r the sum of gradOutput y over the last dimension,
 * out = scale y (gradOutput - r), and 0 where mask is true.
 *
 * gradOutput, y: (B, H, S1, S2), one of FLOAT, FLOAT16 and BF16.
 * mask: BOOL (B or 1, H or 1, S1, S2), or NULL where nothing is masked.
 * fixTriuMask: false.
 * out: of the type and shape of gradOutput.
 */
aclnnStatus aclnnScaledMaskedSoftmaxBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* y,
                                                             const aclTensor* mask, double scale, bool fixTriuMask,
                                                             aclTensor* out, uint64_t* workspaceSize,
                                                             aclOpExecutor** executor);

aclnnStatus aclnnScaledMaskedSoftmaxBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                             aclrtStream stream);

ACL_END_DECLS

#endif
