"""EmbeddingDenseBackward: the gradient of an embedding's weight, the sum of the gradients of each row's look-ups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gradfuse.custom_ops.operator import (
    FLOAT_TYPES,
    Attribute,
    Call,
    Classes,
    Input,
    Operator,
    Output,
    Shape,
    Tensor,
    TorchOp,
    Variant,
    show,
)

if TYPE_CHECKING:
    import torch

MAX_RANK = 8
_INT32_MAX = 2**31 - 1


def _columns(call: Call) -> Shape:
    """The last dimension of grad_output, once the shapes are known to belong together."""
    grad, indices = call.inputs["grad_output"].shape, call.inputs["indices"].shape
    if grad is not None and not 1 <= len(grad) <= MAX_RANK:
        raise call.error("grad_output", f"of rank {len(grad)}", f"rank 1 to {MAX_RANK}")
    if grad is None:
        return None
    if indices is not None:
        if len(indices) != len(grad) - 1:
            raise call.error("indices", f"of shape {show(indices)}", f"shape {show(grad[:-1])}, as grad_output's rows")
        for axis, pair in enumerate(zip(grad, indices, strict=False)):
            call.same("indices", f"dimension {axis}", *pair)
    return grad[-1:]


def _infer(call: Call) -> list[Tensor]:
    number = call.attributes["num_weights"]
    assert isinstance(number, int)
    if not 0 <= number <= _INT32_MAX:
        raise call.error("num_weights", number, f"0 to {_INT32_MAX}")
    call.flag("scale_grad_by_freq")
    columns = _columns(call)
    return [Tensor(OPERATOR.dtype(call), (number, *(columns or (None,))))]


def _choices(call: Call) -> Iterable[str]:
    if call.attributes["scale_grad_by_freq"]:
        yield "scaled"


_SCALE = """
    one = Constant<value_float=1.0>()
    one_real = Cast<to=$real>(one)
    counted = Where(skipped, zero_real, one_real)
    none = Expand(zero_real, number_wide)
    counts = ScatterElements<axis=0, reduction="add">(none, places, counted)
    divisors = Max(counts, one_real)
    divisor_column = Unsqueeze(divisors, one_wide)
    result = Div(sums, divisor_column)
"""


def _body(variant: Variant) -> str:
    # A wrong index is steered to one past the end, the one way to an error that standard operators have.
    return f"""
        wide = Cast<to=$real>(grad_output)
        zero = Constant<value_float=0.0>()
        zero_real = Cast<to=$real>(zero)
        first = Constant<value_int=0>()
        one_wide = Constant<value_ints=[1]>()
        all = Constant<value_ints=[-1]>()
        number = Constant<value_int: int = @num_weights>()
        number_wide = Reshape(number, one_wide)
        padding = Constant<value_int: int = @padding_idx>()
        long_indices = Cast<to=7>(indices)
        flat = Reshape(long_indices, all)
        skipped = Equal(flat, padding)
        used = Where(skipped, first, flat)
        negative = Less(used, first)
        too_large = GreaterOrEqual(used, number)
        wrong = Or(negative, too_large)
        unskipped = Not(skipped)
        refused = And(wrong, unskipped)
        places = Where(refused, number, used)
        columns = Shape<start=-1>(wide)
        rows = Shape(flat)
        row_shape = Concat<axis=0>(rows, columns)
        gradients = Reshape<allowzero=1>(wide, row_shape)
        skipped_column = Unsqueeze(skipped, one_wide)
        kept = Where(skipped_column, zero_real, gradients)
        place_column = Unsqueeze(places, one_wide)
        spread = Expand(place_column, row_shape)
        result_shape = Concat<axis=0>(number_wide, columns)
        empty = Expand(zero_real, result_shape)
        [index_out_of_range] sums = ScatterElements<axis=0, reduction="add">(empty, spread, kept)
        {_SCALE if "scaled" in variant.choices else "result = Identity(sums)"}
        grad_weight = CastLike(result, grad_output)
    """


def _torch_outputs(
    grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int = 0, *_: object
) -> tuple[torch.Tensor, ...]:
    return (grad_output.new_empty((max(num_weights, 0), *grad_output.shape[-1:])),)


OPERATOR = Operator(
    name="EmbeddingDenseBackward",
    stem="embedding_dense_backward",
    doc=(
        "Gradient of an embedding's weight, as aten::embedding_dense_backward: row v is the sum of the rows of "
        "grad_output whose index is v, divided by their number with scale_grad_by_freq. Rows whose index is "
        "padding_idx do not count; an index outside [0, num_weights) is an error at run time."
    ),
    summary="an embedding with respect to its weight: padding, scaling by frequency",
    counterpart="`aten::embedding_dense_backward`",
    inputs=(
        Input("grad_output", "T", "Gradient of what was looked up, (*, C)."),
        Input(
            "indices",
            "I",
            "Which row of the weight each was, (*).",
            holds=Classes(number="num_weights", ignored="padding_idx"),
        ),
    ),
    outputs=(Output("grad_weight", "Gradient w.r.t. the weight, (num_weights, C)."),),
    attributes=(
        Attribute("num_weights", 0, "Number of rows of the weight."),
        Attribute("padding_idx", -1, "Index of the rows that do not count."),
        Attribute("scale_grad_by_freq", 0, "1: each row is divided by the number of its look-ups.", flag=True),
    ),
    constraints={"T": FLOAT_TYPES, "I": ("tensor(int64)", "tensor(int32)")},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    oldest_opset=16,
    samples=({}, {"scale_grad_by_freq": 1}),
)
