"""The operators of the ONNX domain ``aclnn``: schemas, shape inference and function bodies.

Importing this package registers the schemas with onnx.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import onnx

from gradfuse.custom_ops import (
    apply_adam_w,
    apply_adam_w8bit,
    apply_sgd,
    batch_norm,
    batch_norm_backward,
    cast_bfloat16,
    convolution,
    convolution_backward,
    cross_entropy_loss_grad,
    ctc_loss,
    ctc_loss_backward,
    embedding_dense_backward,
    fused_matmul,
    gelu_backward,
    grouped_bias_add_grad,
    gru_recurrence,
    gru_recurrence_backward,
    layer_norm_backward,
    linear_cross_entropy,
    lstm_recurrence,
    lstm_recurrence_backward,
    matmul_n_bits,
    matmul_n_bits_backward,
    max_pool_backward,
    mse_loss_backward,
    pointwise,
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
    scaled_masked_softmax_backward,
    threshold_backward,
)
from gradfuse.custom_ops.operator import DOMAIN, VERSION, Operator

if TYPE_CHECKING:
    import onnxscript.values

    opset: onnxscript.values.Opset

__all__ = ["DOMAIN", "OPS", "VERSION", "Operator", "opset"]

OPS: Mapping[str, Operator] = MappingProxyType(
    {
        module.OPERATOR.name: module.OPERATOR
        for module in (
            cross_entropy_loss_grad,
            mse_loss_backward,
            scaled_masked_softmax_backward,
            ctc_loss_backward,
            grouped_bias_add_grad,
            ctc_loss,
            convolution_backward,
            layer_norm_backward,
            batch_norm_backward,
            batch_norm,
            embedding_dense_backward,
            apply_adam_w,
            apply_adam_w8bit,
            apply_sgd,
            lstm_recurrence,
            lstm_recurrence_backward,
            gru_recurrence,
            gru_recurrence_backward,
            max_pool_backward,
            convolution,
            gelu_backward,
            threshold_backward,
            matmul_n_bits,
            matmul_n_bits_backward,
            scaled_dot_product_attention,
            scaled_dot_product_attention_backward,
            linear_cross_entropy,
            pointwise,
            fused_matmul,
            cast_bfloat16,
        )
    }
)
"""Every operator, by its ONNX name."""

for _operator in OPS.values():
    if not onnx.defs.has(_operator.name, VERSION, DOMAIN):
        onnx.defs.register_schema(_operator.schema)


@atexit.register
def _deregister() -> None:
    """Take the schemas back while Python still runs: onnx 1.19 frees their functions after it, and hangs or crashes."""
    for operator in OPS.values():
        if onnx.defs.has(operator.name, VERSION, DOMAIN):
            onnx.defs.deregister_schema(operator.name, VERSION, DOMAIN)


def __getattr__(name: str) -> object:
    if name != "opset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import onnxscript.values

    # onnxscript takes half a second to import, and only those who write onnxscript functions need this.
    globals()["opset"] = onnxscript.values.Opset(DOMAIN, VERSION)
    return globals()["opset"]
