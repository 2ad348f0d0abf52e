#ifndef GRADFUSE_ACLNNOP_ACLNN_FUSED_MATMUL_H_
#define GRADFUSE_ACLNNOP_ACLNN_FUSED_MATMUL_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Matrix product a b + bias. Sums are in float32, and rounded once.
 *
 * a: (*, M, K), or (*, K, M) with transA; of 2 to 8 dimensions, one of FLOAT, FLOAT16 and BF16.
 * b: (*, K, N), or (*, N, K) with transB; one of FLOAT, FLOAT16 and BF16. The dimensions before the last two are
 * broadcast.
 * bias: (N), of the type of a; may be null.
 * transA, transB: whether the last two dimensions of a factor are swapped.
 * factorsInBFloat16: whether a and b are rounded to bfloat16 before they are multiplied.
 * output: (*, M, N), of the type of a.
 */
aclnnStatus aclnnFusedMatmulGetWorkspaceSize(const aclTensor* a, const aclTensor* b, const aclTensor* bias, bool transA,
                                             bool transB, bool factorsInBFloat16, aclTensor* output,
                                             uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnFusedMatmul(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
