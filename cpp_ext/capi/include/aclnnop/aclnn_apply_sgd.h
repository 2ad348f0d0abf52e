#ifndef GRADFUSE_ACLNNOP_ACLNN_APPLY_SGD_H_
#define GRADFUSE_ACLNNOP_ACLNN_APPLY_SGD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* One update of a parameter and its momentum by SGD, as torch.optim's without dampening.
 *
 * parameter, gradient: one of FLOAT, FLOAT16 and BF16, one shape of rank 0 to 8.
 * learningRate: FLOAT, shape ().
 * momentumBufferOptional: of the type and shape of parameter, zeros before the first update; null for no momentum.
 * gradientScaleOptional: FLOAT, shape (): what gradient is multiplied by first; null for 1.
 * momentum, weightDecay: 0 or more; momentum and nesterov are 0 where momentumBufferOptional is null.
 * newParameter, newMomentumBuffer: of the type and shape of parameter, the latter of shape (0) where
 *     momentumBufferOptional is null; they may lie on the inputs.
 */
aclnnStatus aclnnApplySgdGetWorkspaceSize(const aclTensor* parameter, const aclTensor* gradient,
                                          const aclTensor* learningRate, const aclTensor* momentumBufferOptional,
                                          const aclTensor* gradientScaleOptional, double momentum, double weightDecay,
                                          bool nesterov, aclTensor* newParameter, aclTensor* newMomentumBuffer,
                                          uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnApplySgd(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
