#ifndef GRADFUSE_ACLNNOP_ACLNN_LINEAR_CROSS_ENTROPY_H_
#define GRADFUSE_ACLNNOP_ACLNN_LINEAR_CROSS_ENTROPY_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Cross entropy of the results of a linear layer, and its gradients, which are known up to the factor gradLoss. Nothing
 * of N x C is kept. With z = input linearWeight^T + linearBias, the logits are z, or softcap tanh(z / softcap).
 *
 * input: (N, H); linearWeight: (C, H), C > 0; both one of FLOAT, DOUBLE, FLOAT16 and BF16.
 * target: INT64 (N), classes in [0, C) or ignoreIndex. On the CPU its values are read in both phases.
 * linearBiasOptional: (C), of the type of input, or NULL for 0.
 * weightOptional: FLOAT (C), DOUBLE where input is, or NULL for ones.
 * gradLossOptional: () or (1), (N) for "none", of the type of input; NULL for ones.
 * gradLogsumexpOptional: (N), of the type of input, the gradient of logsumexp; NULL for zeros.
 * reductionOptional: "none", "mean" or "sum"; NULL is "mean".
 * labelSmoothing: in [0, 1]. softcap: positive, or 0 for none.
 * outputMask: five numbers, 0 or 1: which of the outputs are wanted, in their order.
 * loss: (), (N) for "none"; gradInput, gradWeight, gradBias: of the shapes of input, linearWeight and linearBias;
 * logsumexp: (N), the logarithm of the sum of the exponentials of each row's logits. All are of the type of input, and
 * of shape (0) where they are not wanted. Rows whose target is ignoreIndex have no part in the loss.
 */
aclnnStatus aclnnLinearCrossEntropyGetWorkspaceSize(
    const aclTensor* input, const aclTensor* linearWeight, const aclTensor* target, const aclTensor* linearBiasOptional,
    const aclTensor* weightOptional, const aclTensor* gradLossOptional, const aclTensor* gradLogsumexpOptional,
    char* reductionOptional, int64_t ignoreIndex, double labelSmoothing, double softcap, const aclIntArray* outputMask,
    aclTensor* loss, aclTensor* gradInput, aclTensor* gradWeight, aclTensor* gradBias, aclTensor* logsumexp,
    uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnLinearCrossEntropy(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                    aclrtStream stream);

ACL_END_DECLS

#endif
