#ifndef GRADFUSE_ACLNNOP_ACLNN_CROSS_ENTROPY_LOSS_GRAD_H_
#define GRADFUSE_ACLNNOP_ACLNN_CROSS_ENTROPY_LOSS_GRAD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of the cross entropy loss with respect to the logits whose log-softmax is logProb.
 *
 * gradLoss: () or (1), (N) for "none"; logProb: (N, C); both one of FLOAT, FLOAT16 and BF16.
 * target: INT64 (N), classes in [0, C) or ignoreIndex. On the CPU its values are read in both phases.
 * weightOptional: FLOAT (C), or NULL for ones.
 * gradZlossOptional, lseForZlossOptional: NULL, and lseSquareScaleForZloss 0: there is no z-loss.
 * reductionOptional: "none", "mean" or "sum"; NULL is "mean".
 * labelSmoothing: in [0, 1].
 * out: (N, C), of the type of logProb. Rows whose target is ignoreIndex are 0.
 */
aclnnStatus aclnnCrossEntropyLossGradGetWorkspaceSize(const aclTensor* gradLoss, const aclTensor* logProb,
                                                      const aclTensor* target, const aclTensor* weightOptional,
                                                      const aclTensor* gradZlossOptional,
                                                      const aclTensor* lseForZlossOptional, char* reductionOptional,
                                                      int64_t ignoreIndex, double labelSmoothing,
                                                      double lseSquareScaleForZloss, const aclTensor* out,
                                                      uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnCrossEntropyLossGrad(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                      aclrtStream stream);

ACL_END_DECLS

#endif
