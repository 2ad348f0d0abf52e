#ifndef GRADFUSE_ACLNNOP_ACLNN_THRESHOLD_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_THRESHOLD_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of a ReLU, or of a threshold: gradInput is 0 where self, its input or result, is at most the threshold, and
 * gradOutput elsewhere.
 *
 * gradOutput, self: one of FLOAT, DOUBLE, FLOAT16 and BF16, rank 0 to 8, of one shape.
 * gradInput: of the same type and shape.
 */
aclnnStatus aclnnThresholdBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* self, double threshold,
                                                   aclTensor* gradInput, uint64_t* workspaceSize,
                                                   aclOpExecutor** executor);

aclnnStatus aclnnThresholdBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                   aclrtStream stream);

ACL_END_DECLS

#endif
