#ifndef GRADFUSE_ACLNNOP_ACLNN_EMBEDDING_DENSE_BACKWARD_H_
#define GRADFUSE_ACLNNOP_ACLNN_EMBEDDING_DENSE_BACKWARD_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Gradient of an embedding's weight: row v is the sum of the rows of gradOutput whose index is v.
 *
 * gradOutput: (*, C), of 1 to 8 dimensions, one of FLOAT, FLOAT16 and BF16.
 * indices: INT32 or INT64 (*), each in [0, numWeights) or paddingIdx. On the CPU its values are read in both phases.
 * paddingIdx: the index of the rows that do not count.
 * scaleGradByFreq: whether each row of the result is divided by the number of rows that it is the sum of.
 * out: (numWeights, C), of the type of gradOutput.
 */
aclnnStatus aclnnEmbeddingDenseBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* indices,
                                                        int64_t numWeights, int64_t paddingIdx, bool scaleGradByFreq,
                                                        aclTensor* out, uint64_t* workspaceSize,
                                                        aclOpExecutor** executor);

aclnnStatus aclnnEmbeddingDenseBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                        aclrtStream stream);

ACL_END_DECLS

#endif
