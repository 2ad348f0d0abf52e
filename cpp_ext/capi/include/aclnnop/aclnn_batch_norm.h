#ifndef GRADFUSE_ACLNNOP_ACLNN_BATCH_NORM_H_
#define GRADFUSE_ACLNNOP_ACLNN_BATCH_NORM_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Batch normalization in training mode, over all but the channels, with n elements a channel:
 *   saveMean = mean of input;  saveInvstd = 1 / sqrt(variance + eps), of the variance that divides by n
 *   output = weight (input - saveMean) saveInvstd + bias, with relu at least 0
 *   newRunningMean = (1 - momentum) runningMean + momentum saveMean
 *   newRunningVar = (1 - momentum) runningVar + momentum variance, of the variance that divides by n - 1
 *
 * input: (N, C, ...), of 2 to 8 dimensions, one of FLOAT, FLOAT16 and BF16.
 * weightOptional, biasOptional: (C), of the same type, or NULL for ones and zeros.
 * runningMeanOptional, runningVarOptional: (C), of the same type, or NULL. Of a BF16 input all these may be FLOAT or
 *     FLOAT16.
 * momentum: 0 to 1. eps: 0 or more.
 * output: of the type and shape of input; the others: (C), of the type of those before, or of input, but newRunningMean
 * and newRunningVar (0) without runningMeanOptional and runningVarOptional.
 */
aclnnStatus aclnnBatchNormGetWorkspaceSize(const aclTensor* input, const aclTensor* weightOptional,
                                           const aclTensor* biasOptional, const aclTensor* runningMeanOptional,
                                           const aclTensor* runningVarOptional, double momentum, double eps, bool relu,
                                           aclTensor* output, aclTensor* saveMean, aclTensor* saveInvstd,
                                           aclTensor* newRunningMean, aclTensor* newRunningVar, uint64_t* workspaceSize,
                                           aclOpExecutor** executor);

aclnnStatus aclnnBatchNorm(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
