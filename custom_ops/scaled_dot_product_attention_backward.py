"""ScaledDotProductAttentionBackward: the gradients of scaled dot product attention w.r.t. query, key and value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradfuse.custom_ops import attention
from gradfuse.custom_ops.operator import Call, Input, Operator, Output, Tensor, TorchOp, Variant

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    found, dtype = attention.sizes(call), OPERATOR.dtype(call)
    return [attention.tensors(letters, dtype, found) for letters in ("B H L E", "B G S E", "B G S Ev")]


def _probabilities(variant: Variant) -> str:
    """Nodes that compute `p` of `parts`, the exponentials of scores less logsumexp."""
    if "added" not in variant.choices:
        return "p = Identity(parts)"
    return f"""
        part_sum = ReduceSum<keepdims=1>(parts, last)
        sum = Reshape<allowzero=1>(part_sum, column_shape)
        one_float = Constant<value_float=1.0>()
        one_real = Cast<to=$real>(one_float)
        most_float = Constant<value_float={attention.MOST_WITH_DIGITS[variant.wide]}>()
        most = Cast<to=$real>(most_float)
        size = Abs(logsumexp_column)
        has_few_digits = Greater(size, most)
        divisor = Where(has_few_digits, sum, one_real)
        p = Div(parts, divisor)
    """


def _body(variant: Variant) -> str:
    # onnxruntime keeps the shape of a tensor without elements when it reduces its rows, and writes no products of
    # factors without elements.
    return f"""
        {attention.scores(variant)}
        last = Constant<value_ints=[-1]>()
        column_shape = Concat<axis=0>(batch, heads, queries, one)
        logsumexp_column = Unsqueeze(logsumexp, last)
        shifted = Sub(scores, logsumexp_column)
        parts = Exp(shifted)
        {_probabilities(variant)}
        {attention.dropped(variant, "p", "kept_p")}
        real_grad = Cast<to=$real>(grad_output)
        real_output = Cast<to=$real>(output)
        weighted = Mul(real_grad, real_output)
        weighted_sum = ReduceSum<keepdims=1>(weighted, last)
        row_sum = Reshape<allowzero=1>(weighted_sum, column_shape)
        grad_shape = Concat<axis=0>(by_group, group_rows, value_width)
        grad = Reshape<allowzero=1>(real_grad, grad_shape)
        v_turned = Transpose<perm=[0, 1, 3, 2]>(v)
        group_through = MatMul(grad, v_turned)
        through = Reshape<allowzero=1>(group_through, whole_shape)
        {"kept_through = Mul(through, gains)" if "dropout" in variant.choices else "kept_through = Identity(through)"}
        centred = Sub(kept_through, row_sum)
        product = Mul(p, centred)
        grad_scores = Mul(product, scale)
        group_grad_scores = Reshape<allowzero=1>(grad_scores, rows_shape)
        group_grad_query = MatMul(group_grad_scores, k)
        whole_query_shape = Shape(query)
        real_grad_query = Reshape<allowzero=1>(group_grad_query, whole_query_shape)
        grad_query = CastLike(real_grad_query, query)
        turned_grad_scores = Transpose<perm=[0, 1, 3, 2]>(group_grad_scores)
        filled_grad_key = MatMul(turned_grad_scores, q)
        group_p = Reshape<allowzero=1>(kept_p, rows_shape)
        turned_p = Transpose<perm=[0, 1, 3, 2]>(group_p)
        filled_grad_value = MatMul(turned_p, grad)
        key_axis = Constant<value_ints=[2]>()
        any_grad_key = Slice(filled_grad_key, zero, keys, key_axis)
        any_grad_value = Slice(filled_grad_value, zero, keys, key_axis)
        has_rows = Greater(queries, zero)
        zero_float = Constant<value_float=0.0>()
        zero_real = Cast<to=$real>(zero_float)
        real_grad_key = Where(has_rows, any_grad_key, zero_real)
        real_grad_value = Where(has_rows, any_grad_value, zero_real)
        grad_key = CastLike(real_grad_key, query)
        grad_value = CastLike(real_grad_value, query)
    """


def _torch_outputs(
    grad_output: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> tuple[torch.Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in (query, key, value))


OPERATOR = Operator(
    name="ScaledDotProductAttentionBackward",
    stem="scaled_dot_product_attention_backward",
    doc=(
        "Gradients of ScaledDotProductAttention w.r.t. query, key and value. With p = exp(scale query key^T - "
        "logsumexp) where a row sees a key and 0 elsewhere, d what the dropout makes of 1, and r the sum of "
        "grad_output output over a row: grad_value = (d p)^T grad_output, s = scale p (d grad_output value^T - r), "
        "grad_query = s key, grad_key = s^T query; heads of queries that share a head of keys add up there. Rows that "
        "see no key have gradient 0. Where attn_mask adds so much that logsumexp has few digits left, p is divided "
        "by its sum over the row. " + attention.BIASES_HAVE_NO_GRADIENT
    ),
    summary="attention, from queries, keys and values to its output",
    counterpart="`aten::_scaled_dot_product_flash_attention_for_cpu_backward`",
    inputs=(
        Input("grad_output", "T", "Gradient of the output, (B, H, L, Ev)."),
        *attention.ROW_INPUTS,
        Input("output", "T", "Output of ScaledDotProductAttention, (B, H, L, Ev)."),
        Input("logsumexp", "S", "Its logsumexp, (B, H, L)."),
        *attention.OPTIONAL_INPUTS,
    ),
    outputs=(
        Output("grad_query", "Gradient w.r.t. query, of its shape."),
        Output("grad_key", "Gradient w.r.t. key, of its shape."),
        Output("grad_value", "Gradient w.r.t. value, of its shape."),
    ),
    attributes=attention.ATTRIBUTES,
    constraints=attention.CONSTRAINTS,
    infer=_infer,
    choices=attention.choices,
    body=_body,
    torch_op=TorchOp(
        outputs=_torch_outputs,
    ),
    samples=attention.SAMPLES,
    spreads_nan=True,
)
