#pragma once

#include "gradfuse/ops/apply_adam_w.h"
#include "gradfuse/ops/apply_adam_w8bit.h"
#include "gradfuse/ops/apply_sgd.h"
#include "gradfuse/ops/batch_norm.h"
#include "gradfuse/ops/batch_norm_backward.h"
#include "gradfuse/ops/cast_bfloat16.h"
#include "gradfuse/ops/convolution.h"
#include "gradfuse/ops/convolution_backward.h"
#include "gradfuse/ops/cross_entropy_loss_grad.h"
#include "gradfuse/ops/ctc_loss.h"
#include "gradfuse/ops/ctc_loss_backward.h"
#include "gradfuse/ops/embedding_dense_backward.h"
#include "gradfuse/ops/fused_matmul.h"
#include "gradfuse/ops/gelu_backward.h"
#include "gradfuse/ops/grouped_bias_add_grad.h"
#include "gradfuse/ops/gru_recurrence.h"
#include "gradfuse/ops/gru_recurrence_backward.h"
#include "gradfuse/ops/layer_norm_backward.h"
#include "gradfuse/ops/linear_cross_entropy.h"
#include "gradfuse/ops/lstm_recurrence.h"
#include "gradfuse/ops/lstm_recurrence_backward.h"
#include "gradfuse/ops/matmul_n_bits.h"
#include "gradfuse/ops/matmul_n_bits_backward.h"
#include "gradfuse/ops/max_pool_backward.h"
#include "gradfuse/ops/mse_loss_backward.h"
#include "gradfuse/ops/pointwise.h"
#include "gradfuse/ops/scaled_dot_product_attention.h"
#include "gradfuse/ops/scaled_dot_product_attention_backward.h"
#include "gradfuse/ops/scaled_masked_softmax_backward.h"
#include "gradfuse/ops/threshold_backward.h"

namespace gradfuse {

template <class... Args>
struct OpList {};

// The table of all ops. A new op is its header and kernels, and a row here.
using OpTable = OpList<  //
    CrossEntropyLossGradArgs, MseLossBackwardArgs, ScaledMaskedSoftmaxBackwardArgs, CtcLossArgs, CtcLossBackwardArgs,
    GroupedBiasAddGradArgs, ConvolutionBackwardArgs, BatchNormBackwardArgs, BatchNormArgs, EmbeddingDenseBackwardArgs,
    ApplyAdamWArgs, ApplyAdamW8bitArgs, ApplySgdArgs, LstmRecurrenceArgs, LstmRecurrenceBackwardArgs, GruRecurrenceArgs,
    GruRecurrenceBackwardArgs, MaxPoolBackwardArgs, ConvolutionArgs, GeluBackwardArgs, ThresholdBackwardArgs,
    LayerNormBackwardArgs, MatmulNBitsArgs, MatmulNBitsBackwardArgs, ScaledDotProductAttentionArgs,
    ScaledDotProductAttentionBackwardArgs, LinearCrossEntropyArgs, PointwiseArgs, FusedMatmulArgs, CastBfloat16Args>;

// Calls visit(static_cast<Args*>(nullptr)) for the arguments of every op.
template <class Visit, class... Args>
void ForEachOp(OpList<Args...>, const Visit& visit) {
  (visit(static_cast<Args*>(nullptr)), ...);
}

}  // namespace gradfuse
