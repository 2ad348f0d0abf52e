#ifndef GRADFUSE_ACLNNOP_ACLNN_CTC_LOSS_H_
#define GRADFUSE_ACLNNOP_ACLNN_CTC_LOSS_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Connectionist temporal classification, the forward pass: the loss of each item, and the log probabilities of all
 * prefixes of its labels, as aclnnCtcLossBackward takes them.
 *
 * logProbs to zeroInfinity: as in aclnnop/aclnn_ctc_loss_backward.h; zeroInfinity changes nothing here.
 * negLogLikelihood: (N); logAlpha: (N, T, X) with X twice the longest target and one; of the type of logProbs.
 */
aclnnStatus aclnnCtcLossGetWorkspaceSize(const aclTensor* logProbs, const aclTensor* targets,
                                         const aclIntArray* inputLengths, const aclIntArray* targetLengths,
                                         int64_t blank, bool zeroInfinity, aclTensor* negLogLikelihood,
                                         aclTensor* logAlpha, uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnCtcLoss(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
