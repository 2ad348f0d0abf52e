#ifndef GRADFUSE_ACLNNOP_ACLNN_LAYER_NORM_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_LAYER_NORM_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradients of layer normalization, and without a mean those of RMS normalization. With y = (input - mean) rstd,
 * g = weight gradOutput, and means over the axes from axis on:
 *   gradInput = rstd (g - mean of g - y (mean of g y)), without a mean rstd (g - y (mean of g y))
 *   gradWeight = sum of gradOutput y;  gradBias = sum of gradOutput, over the other axes
 *
 * gradOutput, input: of 1 to 8 dimensions, one of FLOAT, DOUBLE, FLOAT16 and BF16.
 * weightOptional: of the same type and the shape of the axes from axis on, or NULL for all ones.
 * meanOptional: FLOAT, or DOUBLE where input is: the shape of input with 1 from axis on; or NULL for 0.
 * rstd: of the type and shape of meanOptional: 1 / sqrt(variance + epsilon).
 * axis: the first of the axes that are normalized; negative: counted from the end.
 * outputMask: three numbers, 0 or 1: which of the three gradients are wanted.
 * gradInput: of the type and shape of input; gradWeight, gradBias: of that type and the shape of weightOptional. A
 *     gradient that is not wanted has shape (0).
 */
aclnnStatus aclnnLayerNormBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* input,
                                                   const aclTensor* weightOptional, const aclTensor* meanOptional,
                                                   const aclTensor* rstd, int64_t axis, const aclIntArray* outputMask,
                                                   aclTensor* gradInput, aclTensor* gradWeight, aclTensor* gradBias,
                                                   uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnLayerNormBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                   aclrtStream stream);

ACL_END_DECLS

#endif
