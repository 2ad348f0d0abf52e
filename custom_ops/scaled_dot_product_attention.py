"""ScaledDotProductAttention: softmax(scale query key^T) value, with masks and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradfuse.custom_ops import attention
from gradfuse.custom_ops.operator import Call, Operator, Output, Tensor, TorchOp, Variant, computed_type

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    found, dtype = attention.sizes(call), OPERATOR.dtype(call)
    return [attention.tensors("B H L Ev", dtype, found), attention.tensors("B H L", computed_type(dtype), found)]


def _body(variant: Variant) -> str:
    largest = "ReduceMax<keepdims=1>(scores, last)" if variant.opset >= 18 else "ReduceMax<axes=[-1]>(scores)"
    # onnxruntime keeps the shape of a tensor without elements when it reduces its rows.
    return f"""
        {attention.scores(variant)}
        last = Constant<value_ints=[-1]>()
        reduced = {largest}
        rows = Concat<axis=0>(batch, heads, queries)
        column_shape = Concat<axis=0>(rows, one)
        largest = Reshape<allowzero=1>(reduced, column_shape)
        sees_nothing = Equal(largest, never)
        zero_float = Constant<value_float=0.0>()
        zero_real = Cast<to=$real>(zero_float)
        shift = Where(sees_nothing, zero_real, largest)
        shifted = Sub(scores, shift)
        parts = Exp(shifted)
        part_sum = ReduceSum<keepdims=1>(parts, last)
        sum = Reshape<allowzero=1>(part_sum, column_shape)
        one_float = Constant<value_float=1.0>()
        one_real = Cast<to=$real>(one_float)
        divisor = Where(sees_nothing, one_real, sum)
        log_sum = Log(divisor)
        logsumexp_column = Add(shift, log_sum)
        logsumexp = Reshape<allowzero=1>(logsumexp_column, rows)
        {attention.dropped(variant, "parts", "kept_parts")}
        group_parts = Reshape<allowzero=1>(kept_parts, rows_shape)
        group_sums = MatMul(group_parts, v)
        sums_shape = Concat<axis=0>(batch, heads, queries, value_width)
        sums = Reshape<allowzero=1>(group_sums, sums_shape)
        means = Div(sums, divisor)
        output = CastLike(means, query)
    """


def _torch_outputs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    import torch

    computed = torch.float32 if query.dtype in (torch.float16, torch.bfloat16) else query.dtype
    return (
        query.new_empty((*query.shape[:-1], *value.shape[-1:])),
        query.new_empty(query.shape[:-1], dtype=computed),
    )


def _torch_setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[torch.Tensor]) -> None:
    query, key, value, *optional = inputs[:6]
    ctx.save_for_backward(query, key, value, *output, *optional)
    ctx.attributes = inputs[6:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _torch_backward(ctx: Any, grad_output: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    import torch

    grads: Sequence[torch.Tensor | None] = (None,) * 3
    if grad_output is not None:
        grads = torch.ops.aclnn.scaled_dot_product_attention_backward(grad_output, *ctx.saved_tensors, *ctx.attributes)
    return (*grads, *(None,) * (len(attention.OPTIONAL_INPUTS) + len(attention.ATTRIBUTES)))


OPERATOR = Operator(
    name="ScaledDotProductAttention",
    stem="scaled_dot_product_attention",
    doc=(
        "Attention: with p = softmax over keys of scale query key^T, where a row sees a key, and dropout d of it, "
        "output = d(p) value, and logsumexp = log of the sum over keys of exp(scale query key^T). A row that sees no "
        "key has output 0 and logsumexp 0. Memory grows with L and S, not with their product. "
        + attention.BIASES_HAVE_NO_GRADIENT
    ),
    summary="(the forward that `ScaledDotProductAttentionBackward` needs)",
    counterpart="`aten::scaled_dot_product_attention`",
    inputs=(*attention.ROW_INPUTS, *attention.OPTIONAL_INPUTS),
    outputs=(
        Output("output", "What each row sees, (B, H, L, Ev)."),
        Output("logsumexp", "Log of the sum of the exponentials of each row's scores, (B, H, L).", type="S"),
    ),
    attributes=attention.ATTRIBUTES,
    constraints=attention.CONSTRAINTS,
    infer=_infer,
    choices=attention.choices,
    body=_body,
    torch_op=TorchOp(
        outputs=_torch_outputs,
        setup_context=_torch_setup_context,
        backward=_torch_backward,
    ),
    samples=attention.SAMPLES,
    spreads_nan=True,
)
