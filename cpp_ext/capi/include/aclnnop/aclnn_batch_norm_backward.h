#ifndef GRADFUSE_ACLNNOP_ACLNN_BATCH_NORM_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_BATCH_NORM_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradients of batch normalization in training mode. With g = gradOutput, or 0 where reluOutputOptional is at most 0,
 * sums over all but the channels, n elements a channel, and d = input - saveMean:
 *   gradBias = sum of g;  gradWeight = saveInvstd (sum of g d)
 *   gradInput = weight saveInvstd (g - gradBias / n - d saveInvstd gradWeight / n)
 *
 * gradOutput, input: (N, C, ...), of 2 to 8 dimensions, one of FLOAT, DOUBLE, FLOAT16 and BF16.
 * weightOptional: (C), of the type of saveMean, or NULL for all ones.
 * saveMean, saveInvstd: (C), of the same type, or of BF16 inputs FLOAT or FLOAT16: the batch's mean and
 *     1 / sqrt(variance + eps).
 * reluOutputOptional: of the type and shape of input: what a ReLU made of the normalization's output; or NULL where
 *     gradOutput is the gradient of that output itself.
 * outputMask: three numbers, 0 or 1: which of the three gradients are wanted.
 * gradInput: of the type and shape of input; gradWeight, gradBias: (C), of the type of saveMean. A gradient that is not
 * wanted has shape (0).
 */
aclnnStatus aclnnBatchNormBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* input,
                                                   const aclTensor* weightOptional, const aclTensor* saveMean,
                                                   const aclTensor* saveInvstd, const aclTensor* reluOutputOptional,
                                                   const aclIntArray* outputMask, aclTensor* gradInput,
                                                   aclTensor* gradWeight, aclTensor* gradBias, uint64_t* workspaceSize,
                                                   aclOpExecutor** executor);

aclnnStatus aclnnBatchNormBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                   aclrtStream stream);

ACL_END_DECLS

#endif
