#ifndef GRADFUSE_ACLNNOP_ACLNN_POINTWISE_H_
#define GRADFUSE_ACLNNOP_ACLNN_POINTWISE_H_

#include "acl/acl.h"

ACL_BEGIN_DECLS

/* Elementwise operators in one pass over memory, each rounded to float32, and results to the type of x0.
 *
 * x0: one of FLOAT, FLOAT16 and BF16, rank 0 to 8. x1Optional to x7Optional: of the same type, each broadcast to the
 *     shape of x0; NULL where expression does not read them.
 * seedOptional: INT64, one element; NULL where expression has no Kept(). drawnOptional: INT64, one element, which is
 *     added to draw; NULL: 0.
 * expressionOptional: assignments to y0, to y1 and y2 if they are wanted, and to other names of lower-case letters,
 *     digits and _, with semicolons between them, as in "t = Sigmoid(x0); y0 = Mul(Mul(x0, t), x1)". Terms are numbers,
 *     names and, of terms, operators of ONNX: Abs, Neg, Reciprocal, Sqrt, Exp, Log, Erf, Tanh, Sigmoid, Relu, Add, Sub,
 *     Mul, Div, Max, Min, the comparisons Equal, Less, LessOrEqual, Greater and GreaterOrEqual, of what these give Not,
 *     And and Or, and Where. Kept() is true where the dropout keeps the element. There may be 64 operators, and 16
 *     results of them that are still to be read at once. NULL: "y0 = x0".
 * dropoutThreshold: of 31 random bits, from 0 (no dropout) to 2^31 - 1. Kept() is false for elements with less.
 * draw: the number of the draw of random bits, which are a hash of seed, draw and the element's place.
 * y0, y1, y2: of the type and shape of x0; y1 and y2 of shape (0) where expression does not assign them.
 */
aclnnStatus aclnnPointwiseGetWorkspaceSize(
    const aclTensor* x0, const aclTensor* x1Optional, const aclTensor* x2Optional, const aclTensor* x3Optional,
    const aclTensor* x4Optional, const aclTensor* x5Optional, const aclTensor* x6Optional, const aclTensor* x7Optional,
    const aclTensor* seedOptional, const aclTensor* drawnOptional, char* expressionOptional, int64_t dropoutThreshold,
    int64_t draw, aclTensor* y0, aclTensor* y1, aclTensor* y2, uint64_t* workspaceSize, aclOpExecutor** executor);

aclnnStatus aclnnPointwise(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

ACL_END_DECLS

#endif
