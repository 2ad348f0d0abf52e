#ifndef GRADFUSE_ACLNNOP_ACLNN_GROUPED_BIAS_ADD_GRAD_H_
#define GRADFUSE_ACLNNOP_ACLNN_GROUPED_BIAS_ADD_GRAD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of a bias that was added to groups of rows: the sum of the rows of each group.
 *
 * gradY: (R, H) where groupIdxOptional is given, else (G, C, H); one of FLOAT, FLOAT16 and BF16.
 * groupIdxOptional: INT32 or INT64 (G), G at most 2048: the end of each group, none before the one before it, the last
 *     of them R. On the CPU its values are read in both phases.
 * out: (G, H), of the type of gradY.
 */
aclnnStatus aclnnGroupedBiasAddGradGetWorkspaceSize(const aclTensor* gradY, const aclTensor* groupIdxOptional,
                                                    aclTensor* out, uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnGroupedBiasAddGrad(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                    aclrtStream stream);

ACL_END_DECLS

#endif
