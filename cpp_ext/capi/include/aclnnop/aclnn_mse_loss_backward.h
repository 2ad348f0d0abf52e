#ifndef GRADFUSE_ACLNNOP_ACLNN_MSE_LOSS_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_MSE_LOSS_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of the mean squared error with respect to self: out = 2 (self - target) gradOutput, over the number of
 * elements of self where reduction is 1.
 *
 * gradOutput, self, target: one of FLOAT, FLOAT16 and BF16, rank 0 to 8, shapes that broadcast together.
 * reduction: 0 none, 1 mean, 2 sum.
 * out: of the same type, and of the shape that the three broadcast to.
 */
aclnnStatus aclnnMseLossBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* self,
                                                 const aclTensor* target, int64_t reduction, aclTensor* out,
                                                 uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnMseLossBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
