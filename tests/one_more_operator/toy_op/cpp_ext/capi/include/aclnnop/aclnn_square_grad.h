#ifndef GRADFUSE_ACLNNOP_ACLNN_SQUARE_GRAD_H_
#define GRADFUSE_ACLNNOP_ACLNN_SQUARE_GRAD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of the squares of all elements with respect to them: out = factor x grad.
 *
 * grad, x: one of FLOAT, FLOAT16 and BF16, of one shape.
 * out: of the same type and shape.
 */
aclnnStatus aclnnSquareGradGetWorkspaceSize(const aclTensor* grad, const aclTensor* x, double factor, aclTensor* out,
                                            uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnSquareGrad(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
