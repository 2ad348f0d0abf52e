#ifndef GRADFUSE_ACLNNOP_ACLNN_SCALED_DOT_PRODUCT_ATTENTION_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_SCALED_DOT_PRODUCT_ATTENTION_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradients of attention. With p = exp(scale query key^T - logsumexp) where a row sees a key, else 0, d what dropout
 * makes of 1, and r = sum of gradOutput output over a row: gradValue = (d p)^T gradOutput;  s = scale p (d gradOutput
 * value^T - r) gradQuery = s key;  gradKey = s^T query, the sum over heads of queries that share one
 *
 * gradOutput, output: (B, H, L, Ev), one of FLOAT, DOUBLE, FLOAT16 and BF16.
 * query, key, value: of the same type: (B, H, L, E), (B, G, S, E) and (B, G, S, Ev), H a multiple of G.
 * logsumexp: of the forward pass, (B, H, L), FLOAT, or DOUBLE where query is.
 * attnMaskOptional: the last 2 to 4 dimensions of (B, H, L, S), each in full or 1. BOOL: true where a row sees a key;
 * or of the type of query: added to the scores. NULL: every key is seen. There is no gradient for it. seedOptional:
 * INT64, one element; may be NULL where dropoutThreshold is 0. drawnOptional: INT64, one element, which is added to
 * draw; NULL: 0. scale: 0 for 1 / sqrt(E). causal: 1: row l sees keys 0 to l; 2: keys 0 to l + S - L; 0: all.
 * dropoutThreshold: of 31 random bits, from 0 (no dropout) to 2^31 - 1. Probabilities with less become 0, others are
 *     divided by 1 - dropoutThreshold / 2^31.
 * draw: the number of the draw of random bits, which are a hash of seed, draw and the place in (B, H, L, S).
 * gradQuery, gradKey, gradValue: of the types and shapes of query, key and value.
 */
aclnnStatus aclnnScaledDotProductAttentionBackwardGetWorkspaceSize(
    const aclTensor* gradOutput, const aclTensor* query, const aclTensor* key, const aclTensor* value,
    const aclTensor* output, const aclTensor* logsumexp, const aclTensor* attnMaskOptional,
    const aclTensor* seedOptional, const aclTensor* drawnOptional, double scale, int64_t causal,
    int64_t dropoutThreshold, int64_t draw, aclTensor* gradQuery, aclTensor* gradKey, aclTensor* gradValue,
    uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnScaledDotProductAttentionBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                                   aclrtStream stream);

ACL_END_DECLS

#endif
