#ifndef GRADFUSE_ACLNNOP_ACLNN_SQUARE_GRAD_H_
#define GRADFUSE_ACLNNOP_ACLNN_SQUARE_GRAD_H_

#include "acl/acl.h"

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

/* Gradient of the squares of all elements with respect to them: out = factor x grad.
 *
 * grad, x: one of FLOAT, FLOAT16 and BF16, of one shape.
 * out: of the same type and shape.
 */
aclnnStatus aclnnSquareGradGetWorkspaceSize(const aclTensor* grad, const aclTensor* x, double factor, aclTensor* out,
                                            uint64_t* workspaceSize, aclOpExecutor** executor);

/* Runs what executor holds, once: it is then gone. */
aclnnStatus aclnnSquareGrad(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop

#endif
