#ifndef GRADFUSE_ACLNNOP_ACLNN_MATMUL_N_BITS_H_
#define GRADFUSE_ACLNNOP_ACLNN_MATMUL_N_BITS_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Product with a weight of few bits: input times the transposed weight, plus bias. Rows of the weight are blocks of
 * numbers, (number - zero point) scale. The lowest bits of a byte are its first number.
 *
 * input: (*, in), of 1 to 8 dimensions, one of FLOAT, FLOAT16 and BF16; what the last block of a row of weight has
 * beyond its in columns does not count.
 * weight: UINT8 (out, blocks, bytes of a block); a block has a power of two of numbers, from 16 on.
 * scales: a scale for each block, of the type of input.
 * zeroPoints: UINT8, packed as the weight, each row from a new byte on; null: 2^(bits - 1).
 * bias: (out), of the type of input; may be null.
 * bits: of a number, 2, 4 or 8.
 * output: (*, out), of the type of input.
 */
aclnnStatus aclnnMatmulNBitsGetWorkspaceSize(const aclTensor* input, const aclTensor* weight, const aclTensor* scales,
                                             const aclTensor* zeroPoints, const aclTensor* bias, int64_t bits,
                                             aclTensor* output, uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnMatmulNBits(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
