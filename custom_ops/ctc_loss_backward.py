"""CtcLossBackward: the gradient of the CTC loss w.r.t. the logits behind log_probs (``aten::_ctc_loss_backward``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops.ctc_loss import (
    ALIGNMENT,
    ALPHA,
    ATTRIBUTES,
    CONSTRAINTS,
    FINAL_STATES,
    PROLOGUE,
    SEQUENCE_INPUTS,
    arithmetic,
    predecessors,
    sequence_dims,
)
from gradfuse.custom_ops.operator import Call, Input, Operator, Output, Tensor, TorchOp, Variant

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    steps, items, classes = sequence_dims(call)
    items = call.same("grad_out", "N", items, *call.shape("grad_out", "N"))
    items = call.same("neg_log_likelihood", "N", items, *call.shape("neg_log_likelihood", "N"))
    alpha_items, alpha_steps, _ = call.shape("log_alpha", "N", "T", "X")
    items = call.same("log_alpha", "N", items, alpha_items)
    steps = call.same("log_alpha", "T", steps, alpha_steps)
    return [Tensor(OPERATOR.dtype(call), (steps, items, classes))]


def _choices(call: Call) -> Iterable[str]:
    narrow = OPERATOR.dtype(call) in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return [*arithmetic(call), *(["own_alpha"] if narrow else [])]


_GIVEN_ALPHA = """
    given_alpha = Cast<to=$real>(log_alpha)
    alpha_width = Shape<start=2, end=3>(given_alpha)
    too_narrow = Less(alpha_width, states)
    too_narrow_at = Cast<to=7>(too_narrow)
    [log_alpha_has_too_few_states] first_given_state = Gather(zero, too_narrow_at)
    cut_alpha = Slice(given_alpha, first_given_state, states, two)
    item_alpha_shape = Concat<axis=0>(items, steps, states)
    item_alpha = Reshape<allowzero=1>(cut_alpha, item_alpha_shape)
    step_alpha = Transpose<perm=[1, 0, 2]>(item_alpha)
    counts = And(runs, in_target)
    live_alpha = Where(counts, step_alpha, never)
    alpha = Concat<axis=0>(live_alpha, past_end)
    has_steps = Greater(input_length, zero)
    final_step = Where(has_steps, ended, steps)
    final_step_start = Mul(final_step, items)
    final_row = Add(final_step_start, item_column_index)
    final_line = Reshape(final_row, minus_one)
    all_rows = Mul(all_steps, items)
    rows_shape = Concat<axis=0>(all_rows, states)
    alpha_rows = Reshape<allowzero=1>(alpha, rows_shape)
    final_alpha = Gather(alpha_rows, final_line)
"""

# A 16-bit log_alpha is too coarse: its rounding errors would add up over the steps.
_OWN_ALPHA = f"""
    {ALPHA}
    alpha = Concat<axis=0>(alpha_by_step, past_end)
"""

# The posterior of each state follows from alpha alone, backwards in time: at the last step it is how alpha divides
# between the two final states, and what a state has at t + 1 comes from its predecessors at t in proportion to their
# alpha. Neither beta nor a logarithm is needed, and errors of alpha that are common to a step cancel.
_POSTERIOR = f"""
    {FINAL_STATES}
    at_final = Or(at_final_blank, at_final_label)
    final_difference = Sub(final_alpha, final_base)
    any_final_part = Exp(final_difference)
    final_part = Where(at_final, any_final_part, zero_real)
    some_final_sum = ReduceSum<keepdims=1>(final_part, one)
    one_real = Cast<to=$real>(next)
    final_sum = Where(no_end, one_real, some_final_sum)
    final_posterior = Div(final_part, final_sum)

    before_start = Constant<value_ints=[-9223372036854775807]>()
    backward_alpha = Slice(alpha, minus_one, before_start, zero, minus_one)
    edges_shape = Concat<axis=0>(all_steps, items, one)
    edges = Expand(never, edges_shape)
    wide_edges_shape = Concat<axis=0>(all_steps, items, two)
    wide_edges = Expand(never, wide_edges_shape)
    {predecessors("source", "backward_alpha", 2, "edges", "wide_edges")}
    divisor = Where(source_unreached, one_real, source_sum)
    stay_share = Div(source_stay_part, divisor)
    near_share = Div(source_near_part, divisor)
    far_share = Div(source_far_part, divisor)
    backward_time = Range(step_count, before_first, before_first)
    no_posterior = Expand(zero_real, all_states)
    near_end = Expand(zero_real, item_column)
    far_end = Expand(zero_real, two_columns)
    first_posterior, backward_posterior = Scan<
        num_scan_inputs=4,
        body=backward_step (later, to_stay, to_near, to_far, step) => ($real_type[?, ?] now, $real_type[?, ?] kept) {{
            stayed = Mul(later, to_stay)
            moved = Mul(later, to_near)
            moved_padded = Concat<axis=1>(moved, near_end)
            moved_back = Slice(moved_padded, one, end_of_axis, one)
            skipped = Mul(later, to_far)
            skipped_padded = Concat<axis=1>(skipped, far_end)
            skipped_back = Slice(skipped_padded, two, end_of_axis, one)
            stayed_or_moved = Add(stayed, moved_back)
            came = Add(stayed_or_moved, skipped_back)
            ends_here = Equal(step, ended)
            begun = Where(ends_here, final_posterior, zero_real)
            now = Add(came, begun)
            kept = Identity(now)
        }}
    >(no_posterior, stay_share, near_share, far_share, backward_time)
    posterior = Slice(backward_posterior, minus_one, zero, zero, minus_one)
"""


def _body(variant: Variant) -> str:
    return f"""
        {PROLOGUE}
        ended = Sub(input_length, one)
        all_steps = Add(steps, one)
        past_end = Expand(never, step_shape)
        step_row = Range(first, step_count, next)
        step_cells_shape = Concat<axis=0>(steps, one, one)
        step_cells = Reshape<allowzero=1>(step_row, step_cells_shape)
        runs = Less(step_cells, input_length)
        {_OWN_ALPHA if "own_alpha" in variant.choices else _GIVEN_ALPHA}
        {_POSTERIOR}
        cell_line = Reshape(cell, minus_one)
        line_shape = Shape(cell_line)
        posterior_shape = Concat<axis=0>(steps, line_shape)
        taken = Neg(posterior)
        taken_rows = Reshape<allowzero=1>(taken, posterior_shape)
        taken_at = Expand(cell_line, posterior_shape)
        p = Exp(table)
        [label_out_of_range] remaining_rows = ScatterElements<axis=1, reduction="add">(p, taken_at, taken_rows)
        shape = Shape(lp)
        remaining = Reshape<allowzero=1>(remaining_rows, shape)
        grad = Cast<to=$real>(grad_out)
        grad_column = Reshape<allowzero=1>(grad, item_column)
        product = Mul(remaining, grad_column)
        loss = Cast<to=$real>(neg_log_likelihood)
        loss_column = Reshape<allowzero=1>(loss, item_column)
        infinite = Neg(never)
        infeasible = Equal(loss_column, infinite)
        zero_infinity_flag = Constant<value_int: int = @zero_infinity>()
        keeps_infinity = Equal(zero_infinity_flag, first)
        not_a_number_float = Constant<value_float=nan>()
        not_a_number = Cast<to=$real>(not_a_number_float)
        infeasible_grad = Where(keeps_infinity, not_a_number, zero_real)
        item_grad = Where(infeasible, infeasible_grad, product)
        step_grad = Where(runs, item_grad, zero_real)
        grad_input = CastLike(step_grad, log_probs)
    """


def _torch_outputs(grad_out: torch.Tensor, log_probs: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return (log_probs.new_empty(log_probs.shape),)


OPERATOR = Operator(
    name="CtcLossBackward",
    stem="ctc_loss_backward",
    doc=(
        "Gradient of the CTC loss w.r.t. the logits behind log_probs, as PyTorch's _ctc_loss_backward: "
        "(exp(log_probs) - posterior of the class) grad_out for the steps of an item and 0 after them. An item "
        "whose neg_log_likelihood is +inf gets NaN, with zero_infinity 0. A class of log-probability -inf gets 0. Of "
        "log_alpha only the steps and states of each item are read."
    ),
    summary="connectionist temporal classification",
    counterpart="`aten::_ctc_loss_backward`",
    inputs=(
        Input("grad_out", "T", "Gradient of each item's loss, (N)."),
        *SEQUENCE_INPUTS,
        Input("neg_log_likelihood", "T", "Loss of each item from CtcLoss, (N)."),
        Input("log_alpha", "T", "Log of CtcLoss's forward variables, (N, T, X), X >= 2 max(target_lengths) + 1."),
    ),
    outputs=(Output("grad_input", "Gradient w.r.t. the logits, (T, N, C)."),),
    attributes=ATTRIBUTES,
    constraints=CONSTRAINTS,
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    oldest_opset=16,  # ScatterElements with a reduction
    aten=("_ctc_loss_backward.Tensor",),
    alignment=ALIGNMENT,
)
