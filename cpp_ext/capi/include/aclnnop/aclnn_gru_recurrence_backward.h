#ifndef GRADFUSE_ACLNNOP_ACLNN_GRU_RECURRENCE_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_GRU_RECURRENCE_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* The gradients of the input, the first state and the recurrent part, h weight^T + bias, of aclnnGruRecurrence. From
 * the last step on, with h' the state before a step, and what comes from the steps behind it in dh: dh = gradHidden +
 * dh;  dn = dh (1 - z) (1 - n^2) gradInput = dn h_n r (1 - r), dh (h' - n) z (1 - z), dn gradRecurrent = the same, but
 * for dn r in the place of dn dh = dh z + gradRecurrent weight
 *
 * gradHidden: (T, N, H), one of FLOAT, FLOAT16 and BF16.
 * initialH: (N, H), of the same type: the state before the first step.
 * hidden: (T, N, H), gates: (T, N, 4 H), of the same type: results of aclnnGruRecurrence.
 * weight: (3 H, H), of the same type.
 * reverse: whether the steps of the forward pass went from the last to the first.
 * gradInput, gradRecurrent: (T, N, 3 H); gradInitialH: (N, H); of the same type.
 */
aclnnStatus aclnnGruRecurrenceBackwardGetWorkspaceSize(const aclTensor* gradHidden, const aclTensor* initialH,
                                                       const aclTensor* hidden, const aclTensor* gates,
                                                       const aclTensor* weight, bool reverse, aclTensor* gradInput,
                                                       aclTensor* gradInitialH, aclTensor* gradRecurrent,
                                                       uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnGruRecurrenceBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                       aclrtStream stream);

ACL_END_DECLS

#endif
