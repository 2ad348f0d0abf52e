#ifndef GRADFUSE_ACLNNOP_ACLNN_APPLY_ADAM_W8BIT_H_
#define GRADFUSE_ACLNNOP_ACLNN_APPLY_ADAM_W8BIT_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* One update of a parameter by AdamW, or by Adam where decoupledWeightDecay is false, with state in 8 bits: each block
 * of 256 elements, in row-major order, has a scale.
 *
 * parameter, gradient: one of FLOAT, FLOAT16 and BF16, one shape of rank 0 to 8.
 * expAvg: UINT8, of the shape of parameter: c stands for (c - 128) |c - 128| / 16129 of the scale.
 * expAvgSq: UINT8, of the shape of parameter: c stands for the square of (c + 1)^2 / 65536 of the scale.
 * expAvgScale, expAvgSqScale: FLOAT, of one dimension with an element a block: its largest absolute value, and the root
 * of its largest square. All zeros before the first update.
 * learningRate: FLOAT, shape ().
 * step: INT64, shape (): the number of updates that were done before.
 * gradientScaleOptional: FLOAT, shape (): what gradient is multiplied by first; null for 1.
 * beta1, beta2: in [0, 1), of which seven decimals count.
 * epsilon, weightDecay: 0 or more.
 * newParameter, newExpAvg, newExpAvgSq, newExpAvgScale, newExpAvgSqScale: of the types and shapes of the inputs of
 * these names; they may lie on the inputs. Both scales of a block with a number that is not finite are NaN.
 */
aclnnStatus aclnnApplyAdamW8bitGetWorkspaceSize(
    const aclTensor* parameter, const aclTensor* gradient, const aclTensor* expAvg, const aclTensor* expAvgSq,
    const aclTensor* expAvgScale, const aclTensor* expAvgSqScale, const aclTensor* learningRate, const aclTensor* step,
    const aclTensor* gradientScaleOptional, double beta1, double beta2, double epsilon, double weightDecay,
    bool decoupledWeightDecay, aclTensor* newParameter, aclTensor* newExpAvg, aclTensor* newExpAvgSq,
    aclTensor* newExpAvgScale, aclTensor* newExpAvgSqScale, uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnApplyAdamW8bit(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
