#ifndef GRADFUSE_ACLNNOP_ACLNN_APPLY_ADAM_W_H_
#define GRADFUSE_ACLNNOP_ACLNN_APPLY_ADAM_W_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* One update of a parameter and its state by AdamW, or by Adam where decoupledWeightDecay is false, as torch.optim's.
 *
 * parameter, gradient, expAvg, expAvgSq: one of FLOAT, FLOAT16 and BF16, one shape of rank 0 to 8.
 * learningRate: FLOAT, shape ().
 * step: INT64, shape (): the number of updates that were done before.
 * gradientScaleOptional: FLOAT, shape (): what gradient is multiplied by first; null for 1.
 * beta1, beta2: in [0, 1), of which seven decimals count.
 * epsilon, weightDecay: 0 or more.
 * newParameter, newExpAvg, newExpAvgSq: of the type and shape of parameter; they may lie on the inputs.
 */
aclnnStatus aclnnApplyAdamWGetWorkspaceSize(const aclTensor* parameter, const aclTensor* gradient,
                                            const aclTensor* expAvg, const aclTensor* expAvgSq,
                                            const aclTensor* learningRate, const aclTensor* step,
                                            const aclTensor* gradientScaleOptional, double beta1, double beta2,
                                            double epsilon, double weightDecay, bool decoupledWeightDecay,
                                            aclTensor* newParameter, aclTensor* newExpAvg, aclTensor* newExpAvgSq,
                                            uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnApplyAdamW(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
