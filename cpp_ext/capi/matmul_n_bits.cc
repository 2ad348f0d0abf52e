#include "gradfuse/ops/matmul_n_bits.h"

#include "aclnnop/aclnn_matmul_n_bits.h"
#include "capi/plan.h"

using Args = gradfuse::MatmulNBitsArgs;

aclnnStatus aclnnMatmulNBitsGetWorkspaceSize(const aclTensor* input, const aclTensor* weight, const aclTensor* scales,
                                             const aclTensor* zeroPoints, const aclTensor* bias, int64_t bits,
                                             aclTensor* output, uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {input, weight, scales, zeroPoints, bias, output}, [&](Args& args) { args.bits = bits; }, workspaceSize,
      executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(MatmulNBits)
