#ifndef GRADFUSE_ACLNNOP_ACLNN_GELU_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_GELU_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of the Gaussian error linear unit with respect to self: gradInput = gradOutput (P(self) + self p(self)),
 * with the normal distribution P and its density p.
 *
 * gradOutput, self: one of FLOAT, FLOAT16 and BF16, rank 0 to 8, of one shape.
 * approximateOptional: "none", or "tanh" for 0.5 self (1 + tanh(sqrt(2 / pi) (self + 0.044715 self^3))); NULL is
 * "none". gradInput: of the same type and shape.
 */
aclnnStatus aclnnGeluBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* self,
                                              char* approximateOptional, aclTensor* gradInput, uint64_t* workspaceSize,
                                              aclOpExecutor** executor);

aclnnStatus aclnnGeluBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
