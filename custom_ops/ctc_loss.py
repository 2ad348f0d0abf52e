"""CtcLoss: connectionist temporal classification, the forward pass that saves alpha (``aten::_ctc_loss``).

The text that its body shares with that of CtcLossBackward is here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from onnx import TensorProto

from gradfuse.custom_ops.operator import (
    ALL_FLOAT_TYPES,
    Alignment,
    Attribute,
    Call,
    Classes,
    Dim,
    Input,
    Operator,
    Output,
    Tensor,
    TorchOp,
    Variant,
    show,
)

if TYPE_CHECKING:
    import torch

TARGET_TYPES = ("tensor(int64)", "tensor(int32)", "tensor(bool)", "tensor(float)", "tensor(float16)")

SEQUENCE_INPUTS = (
    Input("log_probs", "T", "Log-probabilities, (T, N, C)."),
    Input(
        "targets",
        "I",
        "Labels: (N, S) with S at least the longest, or 1-D, those of all items joined.",
        holds=Classes("log_probs", 2, never="blank"),
    ),
    Input("input_lengths", "L", "Steps of each item, (N), each in [0, T]."),
    Input("target_lengths", "L", "Labels of each item, (N)."),
)
ALIGNMENT = Alignment("log_probs", "targets", "input_lengths", "target_lengths")
ATTRIBUTES = (
    Attribute("blank", 0, "Class of the blank label, in [0, C)."),
    Attribute(
        "zero_infinity", 0, "Whether the gradient of an item without any alignment is 0 instead of NaN.", flag=True
    ),
)
CONSTRAINTS = {"T": ALL_FLOAT_TYPES, "I": TARGET_TYPES, "L": ("tensor(int64)",)}


def sequence_dims(call: Call) -> tuple[Dim, Dim, Dim]:
    """The dimensions T, N and C of log_probs, after the checks which both CTC operators share."""
    call.flag("zero_infinity")
    steps, items, classes = call.shape("log_probs", "T", "N", "C")
    items = call.same("input_lengths", "N", items, *call.shape("input_lengths", "N"))
    items = call.same("target_lengths", "N", items, *call.shape("target_lengths", "N"))
    targets = call.inputs["targets"].shape
    if targets is not None and len(targets) not in (1, 2):
        raise call.error("targets", f"of shape {show(targets)}", "shape (N, S), or 1-D: all targets joined")
    if targets is not None and len(targets) == 2:
        items = call.same("targets", "N", items, targets[0])
    blank = call.attributes["blank"]
    if not isinstance(blank, int) or blank < 0 or (isinstance(classes, int) and blank >= classes):
        limit = classes if isinstance(classes, int) else "C"
        raise call.error("blank", blank, f"a class in [0, {limit})")
    return steps, items, classes


def arithmetic(call: Call) -> Iterable[str]:
    """The choice of a body: float64 arithmetic for float64 data, and where the type is not known."""
    wide = OPERATOR.dtype(call) in (TensorProto.DOUBLE, TensorProto.UNDEFINED)
    return ["double"] if wide else []


# (N, X) tensors have X = 2 max(target_lengths) + 1 states in their last dimension, vectors of one element are [1].
# What is out of range is steered to an index past the end of a Gather, the one way to an error of standard operators.
PROLOGUE = """
    lp = Cast<to=$real>(log_probs)
    zero = Constant<value_ints=[0]>()
    one = Constant<value_ints=[1]>()
    two = Constant<value_ints=[2]>()
    minus_one = Constant<value_ints=[-1]>()
    first = Constant<value_int=0>()
    next = Constant<value_int=1>()
    zero_float = Constant<value_float=0.0>()
    zero_real = Cast<to=$real>(zero_float)
    never_float = Constant<value_float=-inf>()
    never = Cast<to=$real>(never_float)

    steps = Shape<start=0, end=1>(lp)
    items = Shape<start=1, end=2>(lp)
    classes = Shape<start=2, end=3>(lp)
    item_column = Concat<axis=0>(items, one)
    input_length = Reshape<allowzero=1>(input_lengths, item_column)
    target_length = Reshape<allowzero=1>(target_lengths, item_column)
    target_length_row = Reshape<allowzero=1>(target_lengths, items)
    length_or_zero = Concat<axis=0>(zero, target_length_row)
    longest = ReduceMax<keepdims=1>(length_or_zero)
    label_states = Mul(longest, two)
    states = Add(label_states, one)

    labels = Cast<to=7>(targets)
    label_line = Reshape(labels, minus_one)
    label_count = Shape(label_line)
    target_shape = Shape(labels)
    target_rank = Shape(target_shape)
    padded = Equal(target_rank, two)
    width = Gather(target_shape, minus_one)
    padded_count = Mul(items, width)
    joined_count = ReduceSum<keepdims=1>(length_or_zero)
    right_count = Where(padded, padded_count, joined_count)
    same_count = Equal(label_count, right_count)
    wrong_count = Not(same_count)
    overlong = Greater(longest, width)
    too_long = And(padded, overlong)
    shortest = ReduceMin<keepdims=1>(length_or_zero)
    negative_length = Less(shortest, zero)
    misfit = Or(wrong_count, too_long)
    bad_targets = Or(misfit, negative_length)
    bad_targets_at = Cast<to=7>(bad_targets)
    too_few_steps = Less(input_length, zero)
    too_many_steps = Greater(input_length, steps)
    bad_steps = Or(too_few_steps, too_many_steps)
    bad_steps_number = Cast<to=7>(bad_steps)
    bad_steps_line = Reshape(bad_steps_number, minus_one)
    bad_steps_or_none = Concat<axis=0>(zero, bad_steps_line)
    bad_steps_at = ReduceMax<keepdims=1>(bad_steps_or_none)
    blank_class = Constant<value_int: int = @blank>()
    blank_vector = Reshape(blank_class, one)
    [target_lengths_do_not_fit_targets] fitting_blank = Gather(blank_vector, bad_targets_at)
    [input_length_out_of_range] blank_label = Gather(fitting_blank, bad_steps_at)

    item_count = Squeeze(items)
    item_row = Range(first, item_count, next)
    padded_start = Mul(item_row, width)
    joined_start = CumSum<exclusive=1>(target_length_row, first)
    start_row = Where(padded, padded_start, joined_start)
    start = Reshape<allowzero=1>(start_row, item_column)
    longest_number = Squeeze(longest)
    label_row = Range(first, longest_number, next)
    inside_target = Less(label_row, target_length)
    label_place = Add(start, label_row)
    label_at = Where(inside_target, label_place, label_count)
    labels_and_blank = Concat<axis=0>(label_line, blank_label)
    label = Gather(labels_and_blank, label_at)

    blank_shape = Concat<axis=0>(items, longest, one)
    blanks = Expand(blank_label, blank_shape)
    label_cells = Unsqueeze(label, two)
    pairs = Concat<axis=2>(blanks, label_cells)
    pair_shape = Concat<axis=0>(items, label_states)
    pair_states = Reshape<allowzero=1>(pairs, pair_shape)
    last_blank = Expand(blank_label, item_column)
    extended = Concat<axis=1>(pair_states, last_blank)

    two_columns = Concat<axis=0>(items, two)
    two_blanks = Expand(blank_label, two_columns)
    blanks_extended = Concat<axis=1>(two_blanks, extended)
    two_before = Slice(blanks_extended, zero, states, one)
    no_skip = Equal(extended, two_before)

    negative_class = Less(extended, zero)
    large_class = GreaterOrEqual(extended, classes)
    wrong_class = Or(negative_class, large_class)
    item_class_count = Mul(items, classes)
    item_column_index = Reshape<allowzero=1>(item_row, item_column)
    item_start = Mul(item_column_index, classes)
    class_cell = Add(item_start, extended)
    cell = Where(wrong_class, item_class_count, class_cell)
    table_shape = Concat<axis=0>(steps, item_class_count)
    table = Reshape<allowzero=1>(lp, table_shape)

    state_count = Squeeze(states)
    state_row = Range(first, state_count, next)
    final_blank = Mul(target_length, two)
    final_label = Sub(final_blank, one)
    in_target = LessOrEqual(state_row, final_blank)
    at_final_blank = Equal(state_row, final_blank)
    at_final_label = Equal(state_row, final_label)
    has_labels = Greater(target_length, zero)
    edge = Expand(never, item_column)
    wide_edge = Expand(never, two_columns)
    step_shape = Concat<axis=0>(one, items, states)
    all_states = Concat<axis=0>(items, states)
    step_count = Squeeze(steps)
    before_first = Constant<value_int=-1>()
    end_of_axis = Constant<value_ints=[9223372036854775807]>()
"""

# From alpha (N, X) of the last step of each item: its two final states and the larger of them, 0 if both are -inf.
FINAL_STATES = """
    blank_choice = Where(at_final_blank, final_alpha, zero_real)
    blank_end = ReduceSum<keepdims=1>(blank_choice, one)
    label_choice = Where(at_final_label, final_alpha, zero_real)
    some_label_end = ReduceSum<keepdims=1>(label_choice, one)
    label_end = Where(has_labels, some_label_end, never)
    final_top = Max(blank_end, label_end)
    no_end = Equal(final_top, never)
    final_base = Where(no_end, zero_real, final_top)
"""


def predecessors(name: str, alpha: str, axis: int, edge: str, wide_edge: str) -> str:
    """Text: exponentials of alpha at a state and one and two before it, less the largest of the three, and their sum.

    ``name`` starts the names of the results; ``axis`` is that of the states; ``edge`` and ``wide_edge`` hold -inf, one
    and two states wide. The base is the largest, or 0 for an unreached state, whose parts need not be 0: exp(-inf) is
    about 1e-308 in float64 on onnxruntime 1.18.
    """
    vector = {1: "one", 2: "two"}[axis]
    return f"""
        {name}_near_padded = Concat<axis={axis}>({edge}, {alpha})
        {name}_near = Slice({name}_near_padded, zero, states, {vector})
        {name}_far_padded = Concat<axis={axis}>({wide_edge}, {alpha})
        {name}_any_far = Slice({name}_far_padded, zero, states, {vector})
        {name}_far = Where(no_skip, never, {name}_any_far)
        {name}_top = Max({alpha}, {name}_near, {name}_far)
        {name}_unreached = Equal({name}_top, never)
        {name}_base = Where({name}_unreached, zero_real, {name}_top)
        {name}_stay_difference = Sub({alpha}, {name}_base)
        {name}_near_difference = Sub({name}_near, {name}_base)
        {name}_far_difference = Sub({name}_far, {name}_base)
        {name}_stay_part = Exp({name}_stay_difference)
        {name}_near_part = Exp({name}_near_difference)
        {name}_far_part = Exp({name}_far_difference)
        {name}_two_parts = Add({name}_stay_part, {name}_near_part)
        {name}_sum = Add({name}_two_parts, {name}_far_part)
    """


# The recursion over the steps: alpha (T, N, X), -inf past an item's steps and states, and the last of each (N, X).
# It starts before the first step, in the first state only, so that the Scan is not empty where T is 0.
ALPHA = f"""
    [label_is_out_of_range] emission = Gather<axis=1>(table, cell)
    no_emission = Expand(zero_real, step_shape)
    emission_from_start = Concat<axis=0>(no_emission, emission)
    forward_time = Range(before_first, step_count, next)
    at_first_state = Equal(state_row, first)
    first_state = Where(at_first_state, zero_real, never)
    start_alpha = Expand(first_state, all_states)
    final_alpha, alpha_from_start = Scan<
        num_scan_inputs=2,
        body=forward_step (alpha_before, emitted, time) => ($real_type[?, ?] alpha_now, $real_type[?, ?] alpha_kept) {{
            {predecessors("came_from", "alpha_before", 1, "edge", "wide_edge")}
            log_parts = Log(came_from_sum)
            log_sum = Add(log_parts, came_from_base)
            reached = Where(came_from_unreached, never, log_sum)
            stepped = Add(reached, emitted)
            has_begun = GreaterOrEqual(time, first)
            has_not_ended = Less(time, input_length)
            runs_now = And(has_begun, has_not_ended)
            alpha_now = Where(runs_now, stepped, alpha_before)
            counts_now = And(runs_now, in_target)
            alpha_kept = Where(counts_now, stepped, never)
        }}
    >(start_alpha, emission_from_start, forward_time)
    alpha_by_step = Slice(alpha_from_start, one, end_of_axis)
"""


def _infer(call: Call) -> list[Tensor]:
    steps, items, _ = sequence_dims(call)
    dtype = OPERATOR.dtype(call)
    return [Tensor(dtype, (items,)), Tensor(dtype, (items, steps, None))]


def _body(variant: Variant) -> str:
    return f"""
        {PROLOGUE}
        {ALPHA}
        alpha_by_item = Transpose<perm=[1, 0, 2]>(alpha_by_step)
        log_alpha = CastLike(alpha_by_item, log_probs)
        {FINAL_STATES}
        blank_end_difference = Sub(blank_end, final_base)
        label_end_difference = Sub(label_end, final_base)
        blank_end_part = Exp(blank_end_difference)
        label_end_part = Exp(label_end_difference)
        end_parts = Add(blank_end_part, label_end_part)
        log_end_parts = Log(end_parts)
        log_end_sum = Add(log_end_parts, final_base)
        log_likelihood = Where(no_end, never, log_end_sum)
        loss_column = Neg(log_likelihood)
        loss = Reshape<allowzero=1>(loss_column, items)
        neg_log_likelihood = CastLike(loss, log_probs)
    """


def _torch_results(log_probs: torch.Tensor, states: int | torch.SymInt) -> tuple[torch.Tensor, ...]:
    items = log_probs.shape[1:2]
    return log_probs.new_empty(items), log_probs.new_empty((*items, *log_probs.shape[:1], states))


def _torch_outputs(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor, *_: int
) -> tuple[torch.Tensor, ...]:
    longest = max(target_lengths.tolist(), default=0)
    # A length that the kernel refuses, as no dimension of targets is that long, must not ask for much memory before.
    return _torch_results(log_probs, 2 * min(max(longest, 0), max(targets.shape, default=0)) + 1)


def _torch_fake(log_probs: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    import torch

    return _torch_results(log_probs, torch.library.get_ctx().new_dynamic_size(min=1))


def _torch_setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[torch.Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _torch_backward(ctx: Any, grad_out: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    import torch

    if grad_out is None:
        return (None,) * 6
    grad = torch.ops.aclnn.ctc_loss_backward(grad_out, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return (grad, *(None,) * 5)


OPERATOR = Operator(
    name="CtcLoss",
    stem="ctc_loss",
    doc=(
        "Connectionist temporal classification loss of each item, and the logarithms of its forward variables, as "
        "PyTorch's _ctc_loss. neg_log_likelihood is +inf where no alignment exists, whatever zero_infinity, which only "
        "the gradient reads. log_alpha is -inf past the steps and states of an item. Lengths or labels out of range "
        "are an error at run time."
    ),
    summary="(the forward that `CtcLossBackward` needs)",
    counterpart="`aten::_ctc_loss`",
    inputs=SEQUENCE_INPUTS,
    outputs=(
        Output("neg_log_likelihood", "Negative log-likelihood of each item, (N)."),
        Output("log_alpha", "Log of the forward variables, (N, T, 2 max(target_lengths) + 1)."),
    ),
    attributes=ATTRIBUTES,
    constraints=CONSTRAINTS,
    infer=_infer,
    choices=arithmetic,
    body=_body,
    torch_op=TorchOp(
        outputs=_torch_outputs,
        fake=_torch_fake,
        setup_context=_torch_setup_context,
        backward=_torch_backward,
    ),
    aten=("_ctc_loss.Tensor",),
    alignment=ALIGNMENT,
)
