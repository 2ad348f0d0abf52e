#ifndef GRADFUSE_ACLNNOP_ACLNN_LSTM_RECURRENCE_H_
#define GRADFUSE_ACLNNOP_ACLNN_LSTM_RECURRENCE_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* The recurrence of an LSTM over T steps, of N items and H units, whose input is projected already. At step t, with
 * h and c of the step before it:
 *   i, f, g, o = the four parts of input + h weight^T + bias;  i, f, o = sigmoid of each;  g = tanh(g)
 *   c = f c + i g;  h = o tanh(c)
 *
 * input: (T, N, 4 H), one of FLOAT, FLOAT16 and BF16.
 * initialH, initialC: (N, H), of the same type: h and c before the first step.
 * weight: (4 H, H), of the same type.
 * biasOptional: (4 H), of the same type, or NULL for zeros.
 * reverse: whether steps go from the last to the first.
 * hidden, cell: (T, N, H), of the same type: h and c behind each step. gates: (T, N, 4 H): i, f, g and o.
 */
aclnnStatus aclnnLstmRecurrenceGetWorkspaceSize(const aclTensor* input, const aclTensor* initialH,
                                                const aclTensor* initialC, const aclTensor* weight,
                                                const aclTensor* biasOptional, bool reverse, aclTensor* hidden,
                                                aclTensor* cell, aclTensor* gates, uint64_t* workspaceSize,
                                                aclOpExecutor** executor);

aclnnStatus aclnnLstmRecurrence(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
