#ifndef GRADFUSE_ACLNNOP_ACLNN_CAST_BFLOAT16_H_
#define GRADFUSE_ACLNNOP_ACLNN_CAST_BFLOAT16_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Casts FLOAT to BF16, rounded to the nearest, ties to even, or BF16 to FLOAT.
 *
 * self: FLOAT or BF16, rank 0 to 8.
 * to: the type of output as ONNX numbers types: 16 for BF16, 1 for FLOAT.
 * output: of the other type, and of the shape of self.
 */
aclnnStatus aclnnCastBfloat16GetWorkspaceSize(const aclTensor* self, int64_t to, aclTensor* output,
                                              uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnCastBfloat16(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
