#ifndef GRADFUSE_ACLNNOP_ACLNN_GRU_RECURRENCE_H_
#define GRADFUSE_ACLNNOP_ACLNN_GRU_RECURRENCE_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* The recurrence of a GRU over T steps, of N items and H units, whose input is projected already. At step t, with h of
 * the step before it:
 *   x_r, x_z, x_n = the three parts of input;  h_r, h_z, h_n = those of h weight^T + bias
 *   r = sigmoid(x_r + h_r);  z = sigmoid(x_z + h_z);  n = tanh(x_n + r h_n);  h = n + z (h - n)
 *
 * input: (T, N, 3 H), one of FLOAT, FLOAT16 and BF16.
 * initialH: (N, H), of the same type: h before the first step.
 * weight: (3 H, H), of the same type.
 * biasOptional: (3 H), of the same type, or NULL for zeros.
 * reverse: whether steps go from the last to the first.
 * hidden: (T, N, H), of the same type: h behind each step. gates: (T, N, 4 H): r, z, n and h_n.
 */
aclnnStatus aclnnGruRecurrenceGetWorkspaceSize(const aclTensor* input, const aclTensor* initialH,
                                               const aclTensor* weight, const aclTensor* biasOptional, bool reverse,
                                               aclTensor* hidden, aclTensor* gates, uint64_t* workspaceSize,
                                               aclOpExecutor** executor);

aclnnStatus aclnnGruRecurrence(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
