#ifndef GRADFUSE_ACLNNOP_ACLNN_CTC_LOSS_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_CTC_LOSS_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of the CTC loss with respect to the logits behind logProbs.
 *
 * gradOut: (N); logProbs: (T, N, C); both one of FLOAT, DOUBLE, FLOAT16 and BF16.
 * targets: INT64, INT32, BOOL, FLOAT or FLOAT16, (N, S), or the labels of all items joined in one dimension. On the CPU
 *     its values are read in both phases.
 * inputLengths, targetLengths: N lengths, the former at most T, the latter at most S.
 * negLogLikelihood: (N); logAlpha: (N, T, X) with X at least twice the longest target and one: from aclnnCtcLoss.
 * blank: a class in [0, C).
 * zeroInfinity: whether an item whose loss is infinite has gradient 0, not NaN.
 * out: (T, N, C), of the type of logProbs.
 */
aclnnStatus aclnnCtcLossBackwardGetWorkspaceSize(const aclTensor* gradOut, const aclTensor* logProbs,
                                                 const aclTensor* targets, const aclIntArray* inputLengths,
                                                 const aclIntArray* targetLengths, const aclTensor* negLogLikelihood,
                                                 const aclTensor* logAlpha, int64_t blank, bool zeroInfinity,
                                                 aclTensor* out, uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnCtcLossBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
