"""GroupedBiasAddGrad: the gradient of a bias that is added to groups of rows, the sum of each group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gradfuse.custom_ops.operator import FLOAT_TYPES, Call, Ends, Input, Operator, Output, Tensor, TorchOp, Variant

if TYPE_CHECKING:
    import torch

MAX_GROUPS = 2048


def _infer(call: Call) -> list[Tensor]:
    if "group_idx" not in call.inputs:
        groups, _, columns = call.shape("grad_y", "G", "C", "H")
        return [Tensor(OPERATOR.dtype(call), (groups, columns))]
    _, columns = call.shape("grad_y", "R", "H")
    (groups,) = call.shape("group_idx", "G")
    if isinstance(groups, int) and groups > MAX_GROUPS:
        raise call.error("group_idx", f"of {groups} groups", f"at most {MAX_GROUPS}")
    return [Tensor(OPERATOR.dtype(call), (groups, columns))]


def _choices(call: Call) -> Iterable[str]:
    return []


# Both forms sum blocks of rows first, so that the rounding error does not grow with the number of rows. The Reshape
# keeps the rows in place: where onnxruntime takes out casts ahead of them, it forgets the graphs that read them.
_CONSTANTS = """
    real_rows = Cast<to=$real>(grad_y)
    shape = Shape(real_rows)
    rows = Reshape<allowzero=1>(real_rows, shape)
    zero = Constant<value_ints=[0]>()
    one = Constant<value_ints=[1]>()
    full_block = Constant<value_ints=[128]>()
"""

# A Scan over the groups: ScatterND adds duplicates in no fixed order, and a product with a membership matrix or a
# difference of running sums would carry a NaN of one group to the others. The group put before the first keeps
# the Scan from being empty.
_BY_ENDS = """
    minus_one = Constant<value_ints=[-1]>()
    ends = Cast<to=7>(group_idx)
    bounds = Concat<axis=0>(zero, ends)
    starts = Slice(bounds, zero, minus_one)
    lengths = Sub(ends, starts)
    decreasing = Less(lengths, zero)
    row_count = Shape<start=0, end=1>(rows)
    last_end = Gather(bounds, minus_one)
    reached = Equal(last_end, row_count)
    missed = Not(reached)
    faults = Concat<axis=0>(missed, decreasing)
    fault_numbers = Cast<to=7>(faults)
    fault = ReduceMax<keepdims=1>(fault_numbers)
    [group_ends_decrease_or_miss_the_last_row] block = Gather(full_block, fault)
    columns = Shape<start=1, end=2>(rows)
    scan_starts = Concat<axis=0>(zero, starts)
    scan_ends = Concat<axis=0>(zero, ends)
    sums = Scan<num_scan_inputs=2, body=group (start, end) => ($real_type[?] group_sum) {
        begin = Reshape(start, one)
        stop = Reshape(end, one)
        length = Sub(stop, begin)
        block_count = Div(length, block)
        covered = Mul(block_count, block)
        middle = Add(begin, covered)
        head = Slice(rows, begin, middle, zero)
        block_shape = Concat<axis=0>(block_count, block, columns)
        blocks = Reshape<allowzero=1>(head, block_shape)
        block_sums = ReduceSum<keepdims=0>(blocks, one)
        head_sum = ReduceSum<keepdims=0>(block_sums, zero)
        tail = Slice(rows, middle, stop, zero)
        tail_sum = ReduceSum<keepdims=0>(tail, zero)
        group_sum = Add(head_sum, tail_sum)
    }>(scan_starts, scan_ends)
    end_of_axis = Constant<value_ints=[9223372036854775807]>()
    total = Slice(sums, one, end_of_axis)
"""

_BY_AXIS = """
    two = Constant<value_ints=[2]>()
    groups = Shape<start=0, end=1>(rows)
    length = Shape<start=1, end=2>(rows)
    columns = Shape<start=2, end=3>(rows)
    at_least_one = Max(length, one)
    block = Min(at_least_one, full_block)
    rest = Mod(length, block)
    covered = Sub(length, rest)
    block_count = Div(covered, block)
    block_shape = Concat<axis=0>(groups, block_count, block, columns)
    no_rest = Equal(rest, zero)
    even = Squeeze(no_rest)
    total = If(even) <
        then_branch = whole_blocks () => (whole_sum) {
            all_blocks = Reshape<allowzero=1>(rows, block_shape)
            all_block_sums = ReduceSum<keepdims=0>(all_blocks, two)
            whole_sum = ReduceSum<keepdims=0>(all_block_sums, one)
        },
        else_branch = blocks_and_rest () => (split_sum) {
            head = Slice(rows, zero, covered, one)
            blocks = Reshape<allowzero=1>(head, block_shape)
            block_sums = ReduceSum<keepdims=0>(blocks, two)
            head_sum = ReduceSum<keepdims=0>(block_sums, one)
            tail = Slice(rows, covered, length, one)
            tail_sum = ReduceSum<keepdims=0>(tail, one)
            split_sum = Add(head_sum, tail_sum)
        }
    >
"""


def _body(variant: Variant) -> str:
    return f"""
        {_CONSTANTS}
        {_BY_ENDS if "group_idx" in variant.inputs else _BY_AXIS}
        grad_bias = CastLike(total, grad_y)
    """


def _torch_outputs(grad_y: torch.Tensor, group_idx: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    groups = grad_y.shape[:1] if group_idx is None else group_idx.shape
    return (grad_y.new_empty((*groups, *grad_y.shape[-1:])),)


OPERATOR = Operator(
    name="GroupedBiasAddGrad",
    stem="grouped_bias_add_grad",
    doc=(
        "Gradient of a bias added to groups of rows: the sum of the rows of each group. With group_idx, group j of "
        "grad_y (R, H) has the rows from group_idx[j-1] (0 for the first) up to but not including group_idx[j]; the "
        "ends do not decrease and the last is R, anything else is an error at run time. Without, grad_y (G, C, H) is "
        "summed over C."
    ),
    summary="a bias added to groups of rows",
    counterpart="segment sums",
    inputs=(
        Input("grad_y", "T", "Gradient of the sum: (R, H) with group_idx, else (G, C, H)."),
        Input(
            "group_idx",
            "I",
            "End of each group of rows, (G), at most 2048 of them.",
            optional=True,
            holds=Ends("grad_y", 0),
        ),
    ),
    outputs=(Output("grad_bias", "Gradient w.r.t. the bias, (G, H)."),),
    attributes=(),
    constraints={"T": FLOAT_TYPES, "I": ("tensor(int64)", "tensor(int32)")},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
)
