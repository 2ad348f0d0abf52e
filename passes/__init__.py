"""Graph-rewrite passes: decomposed backward subgraphs become fused operators of the domain `aclnn`."""

from gradfuse.passes.apply_adam_w import FuseApplyAdamWPass
from gradfuse.passes.apply_sgd import FuseApplySgdPass
from gradfuse.passes.batch_norm_backward import FuseBatchNormBackwardPass
from gradfuse.passes.convolution_backward import FuseConvolutionBackwardPass
from gradfuse.passes.cross_entropy_loss_grad import FuseCrossEntropyLossGradPass
from gradfuse.passes.embedding_dense_backward import FuseEmbeddingDenseBackwardPass
from gradfuse.passes.gelu_backward import FuseGeluBackwardPass
from gradfuse.passes.grouped_bias_add_grad import FuseGroupedBiasAddGradPass
from gradfuse.passes.layer_norm_backward import FuseLayerNormBackwardPass
from gradfuse.passes.matching import FusePass
from gradfuse.passes.max_pool_backward import FuseMaxPoolBackwardPass
from gradfuse.passes.mse_loss_backward import FuseMseLossBackwardPass
from gradfuse.passes.pipeline import default_pipeline
from gradfuse.passes.pointwise import FusePointwisePass
from gradfuse.passes.recompute import Recomputation, RecomputePass
from gradfuse.passes.report import ExporterBug, Fusion, NearMiss, Report
from gradfuse.passes.scaled_dot_product_attention import FuseScaledDotProductAttentionPass
from gradfuse.passes.scaled_dot_product_attention_backward import FuseScaledDotProductAttentionBackwardPass
from gradfuse.passes.scaled_masked_softmax_backward import FuseScaledMaskedSoftmaxBackwardPass
from gradfuse.passes.threshold_backward import FuseThresholdBackwardPass

__all__ = [
    "ExporterBug",
    "FuseApplyAdamWPass",
    "FuseApplySgdPass",
    "FuseBatchNormBackwardPass",
    "FuseConvolutionBackwardPass",
    "FuseCrossEntropyLossGradPass",
    "FuseEmbeddingDenseBackwardPass",
    "FuseGeluBackwardPass",
    "FuseGroupedBiasAddGradPass",
    "FuseLayerNormBackwardPass",
    "FuseMaxPoolBackwardPass",
    "FuseMseLossBackwardPass",
    "FusePass",
    "FusePointwisePass",
    "FuseScaledDotProductAttentionBackwardPass",
    "FuseScaledDotProductAttentionPass",
    "FuseScaledMaskedSoftmaxBackwardPass",
    "FuseThresholdBackwardPass",
    "Fusion",
    "NearMiss",
    "Recomputation",
    "RecomputePass",
    "Report",
    "default_pipeline",
]
