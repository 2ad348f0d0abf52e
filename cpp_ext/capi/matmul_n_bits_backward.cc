#include "gradfuse/ops/matmul_n_bits_backward.h"

#include "aclnnop/aclnn_matmul_n_bits_backward.h"
#include "capi/plan.h"

using Args = gradfuse::MatmulNBitsBackwardArgs;

aclnnStatus aclnnMatmulNBitsBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* weight,
                                                     const aclTensor* scales, const aclTensor* zeroPoints,
                                                     int64_t inFeatures, int64_t bits, aclTensor* gradInput,
                                                     uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradOutput, weight, scales, zeroPoints, gradInput},
      [&](Args& args) {
        args.in_features = inFeatures;
        args.bits = bits;
      },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(MatmulNBitsBackward)
