#ifndef GRADFUSE_ACLNNOP_ACLNN_MATMUL_N_BITS_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_MATMUL_N_BITS_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of a product with a weight of few bits with respect to what it multiplies: gradOutput times the weight,
 * whose rows are blocks of numbers, (number - zero point) scale. The lowest bits of a byte are its first number.
 *
 * gradOutput: (*, out), of 1 to 8 dimensions, one of FLOAT, FLOAT16 and BF16.
 * weight: UINT8 (out, blocks, bytes of a block); a block has a power of two of numbers, from 16 on.
 * scales: a scale for each block, of the type of gradOutput.
 * zeroPoints: UINT8, packed as the weight, each row from a new byte on; null: 2^(bits - 1).
 * inFeatures: the columns of the weight: what the last block has beyond them does not count.
 * bits: of a number, 2, 4 or 8.
 * gradInput: (*, inFeatures), of the type of gradOutput.
 */
aclnnStatus aclnnMatmulNBitsBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* weight,
                                                     const aclTensor* scales, const aclTensor* zeroPoints,
                                                     int64_t inFeatures, int64_t bits, aclTensor* gradInput,
                                                     uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnMatmulNBitsBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                     aclrtStream stream);

ACL_END_DECLS

#endif
