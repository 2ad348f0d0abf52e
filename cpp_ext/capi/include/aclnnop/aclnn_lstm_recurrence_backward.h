#ifndef GRADFUSE_ACLNNOP_ACLNN_LSTM_RECURRENCE_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_LSTM_RECURRENCE_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* The gradients of the input and the first states of aclnnLstmRecurrence. From the last step on, with c' the cell
 * before a step, and what comes from the steps behind it in dh and dc:
 *   dh = gradHidden + dh;  dc = gradCell + dc + dh o (1 - tanh(c)^2)
 *   gradInput = dc g i (1 - i), dc c' f (1 - f), dc i (1 - g^2), dh tanh(c) o (1 - o)
 *   dh = gradInput weight;  dc = dc f
 *
 * gradHidden: (T, N, H), one of FLOAT, FLOAT16 and BF16.
 * gradCellOptional: (T, N, H), of the same type, or NULL for zeros.
 * initialC: (N, H), of the same type: the cell before the first step.
 * cell: (T, N, H), gates: (T, N, 4 H), of the same type: results of aclnnLstmRecurrence.
 * weight: (4 H, H), of the same type.
 * reverse: whether the steps of the forward pass went from the last to the first.
 * gradInput: (T, N, 4 H); gradInitialH, gradInitialC: (N, H); of the same type.
 */
aclnnStatus aclnnLstmRecurrenceBackwardGetWorkspaceSize(const aclTensor* gradHidden, const aclTensor* gradCellOptional,
                                                        const aclTensor* initialC, const aclTensor* cell,
                                                        const aclTensor* gates, const aclTensor* weight, bool reverse,
                                                        aclTensor* gradInput, aclTensor* gradInitialH,
                                                        aclTensor* gradInitialC, uint64_t* workspaceSize,
                                                        aclOpExecutor** executor);

aclnnStatus aclnnLstmRecurrenceBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                        aclrtStream stream);

ACL_END_DECLS

#endif
