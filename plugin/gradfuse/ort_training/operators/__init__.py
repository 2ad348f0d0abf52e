"""The operators that exist in onnxruntime's training build only, written in ONNX's standard operators.

`replace` rewrites a graph; `REPLACEMENTS` has one function an operator. These operators have no specification of their
own: each is the gradient that its name says, of the ONNX operator's inputs, and tests compare it with the kernel of
onnxruntime-training 1.19.2. Operators of onnxruntime's own domain that such graphs hold beside them, such as
FusedMatMul and Gelu, are replaced too, so that the result is plain ONNX.

A function gets the operator's inputs, None where one is left out, and its attributes by name, and returns a value for
each output that the operator can have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx
import onnx_ir as ir

from gradfuse.errors import ModelError, one_line
from gradfuse.ort_training.operators import activations, arithmetic, losses, normalization, selections, windows
from gradfuse.ort_training.operators.building import Operators, Unsupported, Value

DOMAIN = "com.microsoft"
REPLACEMENT_OPSET = 17
"""The oldest default-domain opset that the replacements are valid in."""

Replacement: TypeAlias = Callable[..., "Value | Sequence[Value]"]

REPLACEMENTS: dict[tuple[str, str], Replacement] = {
    ("", "MaxPoolGrad"): windows.max_pool_grad,
    ("", "SimplifiedLayerNormalization"): normalization.simplified_layer_normalization,
    (DOMAIN, "BatchNormInternal"): normalization.batch_norm_internal,
    (DOMAIN, "BatchNormalizationGrad"): normalization.batch_normalization_grad,
    (DOMAIN, "BroadcastGradientArgs"): arithmetic.broadcast_gradient_args,
    (DOMAIN, "ConcatTraining"): selections.concat_training,
    (DOMAIN, "ConvGrad"): windows.conv_grad,
    (DOMAIN, "DivGrad"): arithmetic.div_grad,
    (DOMAIN, "DropoutGrad"): activations.dropout_grad,
    (DOMAIN, "FastGelu"): activations.fast_gelu,
    (DOMAIN, "FastGeluGrad"): activations.fast_gelu_grad,
    (DOMAIN, "FusedMatMul"): arithmetic.fused_mat_mul,
    (DOMAIN, "GatherElementsGrad"): selections.gather_elements_grad,
    (DOMAIN, "GatherGrad"): selections.gather_grad,
    (DOMAIN, "GatherNDGrad"): selections.gather_nd_grad,
    (DOMAIN, "Gelu"): activations.gelu,
    (DOMAIN, "GeluGrad"): activations.gelu_grad,
    (DOMAIN, "LayerNormalizationGrad"): normalization.layer_normalization_grad,
    (DOMAIN, "LeakyReluGrad"): activations.leaky_relu_grad,
    (DOMAIN, "LogSoftmaxGrad_13"): activations.log_softmax_grad,
    (DOMAIN, "QuickGelu"): activations.quick_gelu,
    (DOMAIN, "QuickGeluGrad"): activations.quick_gelu_grad,
    (DOMAIN, "ReluGrad"): activations.relu_grad,
    (DOMAIN, "Scale"): arithmetic.scale,
    (DOMAIN, "SigmoidGrad"): activations.sigmoid_grad,
    (DOMAIN, "SimplifiedLayerNormalizationGrad"): normalization.simplified_layer_normalization_grad,
    (DOMAIN, "SliceGrad"): selections.slice_grad,
    (DOMAIN, "SoftmaxCrossEntropyLossGrad"): losses.softmax_cross_entropy_loss_grad,
    (DOMAIN, "SoftmaxGrad_13"): activations.softmax_grad,
    (DOMAIN, "SplitTraining"): selections.split_training,
    (DOMAIN, "TanhGrad"): activations.tanh_grad,
}


def replace(graph: ir.Graph, source: str) -> None:
    """Put standard operators in the place of onnxruntime's in a graph.

    Args:
        graph: is changed in place. The version of its default domain is at least `REPLACEMENT_OPSET`.
        source: what to call the model in messages.

    Raises:
        ModelError: an operator of onnxruntime has no replacement; one error names them all.
    """
    opset = graph.opset_imports[""]
    failures: dict[str, str] = {}
    for node in list(graph.all_nodes()):
        replacement = REPLACEMENTS.get((node.domain, node.op_type))
        if replacement is None:
            if node.domain == DOMAIN or (node.domain == "" and not onnx.defs.has(node.op_type)):
                failures.setdefault(node.op_type, node.op_type)
            continue
        op = Operators(opset, node)
        try:
            outputs = _call(replacement, op, node)
        except Unsupported as error:
            failures.setdefault(node.op_type, f"{node.op_type} ({error})")
            continue
        pairs = [pair for pair in zip(node.outputs, outputs, strict=False) if pair[0].name]
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], op.nodes, *zip(*pairs, strict=True))
    if failures:
        raise ModelError(
            f"{source}: has operators of onnxruntime-training that gradfuse cannot replace: "
            f"{', '.join(sorted(failures.values()))}"
        )


def _call(replacement: Replacement, op: Operators, node: ir.Node) -> Sequence[Value]:
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    try:
        call = inspect.signature(replacement).bind(op, *node.inputs, **attributes)
    except TypeError as error:
        raise Unsupported(str(error)) from error
    try:
        result = replacement(*call.args, **call.kwargs)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        # No schema has checked the attributes and inputs of these operators.
        raise Unsupported(f"malformed: {one_line(error)}") from error
    return [result] if isinstance(result, ir.Value) else result
