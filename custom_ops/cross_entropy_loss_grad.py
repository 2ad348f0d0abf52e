"""CrossEntropyLossGrad: the gradient of cross entropy w.r.t. the logits, from their log-softmax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gradfuse.custom_ops.operator import (
    FLOAT_TYPES,
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

_REDUCTIONS = ("mean", "sum", "none")


def check_options(call: Call) -> str:
    """Check the attributes that operators of cross entropy share; return the reduction."""
    reduction, smoothing = call.attributes["reduction"], call.attributes["label_smoothing"]
    if reduction not in _REDUCTIONS:
        raise call.error("reduction", repr(reduction), " or ".join(map(repr, _REDUCTIONS)))
    if not (isinstance(smoothing, float) and 0.0 <= smoothing <= 1.0):
        raise call.error("label_smoothing", smoothing, "a number in [0, 1]")
    return str(reduction)


def check_grad_loss(call: Call, reduction: str, rows: Dim) -> Dim:
    """Check the shape of the loss' gradient; return the number of rows."""
    grad = call.inputs["grad_loss"].shape
    if reduction == "none":
        return call.same("grad_loss", "N", rows, *call.shape("grad_loss", "N"))
    if grad is not None and (len(grad) > 1 or (len(grad) == 1 and isinstance(grad[0], int) and grad[0] != 1)):
        raise call.error("grad_loss", f"of shape {show(grad)}", f"shape () or (1) for reduction '{reduction}'")
    return rows


def _infer(call: Call) -> list[Tensor]:
    reduction = check_options(call)
    if call.attributes["lse_square_scale_for_zloss"] != 0:
        found = call.attributes["lse_square_scale_for_zloss"]
        raise call.error("lse_square_scale_for_zloss", found, "0 (z-loss: not supported)")
    for name in ("grad_zloss", "lse_for_zloss"):
        if name in call.inputs:
            raise call.error(name, "given", "absent (z-loss: not supported)")

    rows, classes = call.shape("log_prob", "N", "C")
    rows = call.same("target", "N", rows, *call.shape("target", "N"))
    classes = call.same("weight", "C", classes, *call.shape("weight", "C"))
    if classes == 0:
        raise call.error("log_prob", f"of shape {show((rows, classes))}", "C > 0")
    rows = check_grad_loss(call, reduction, rows)
    return [Tensor(OPERATOR.dtype(call), (rows, classes))]


def _choices(call: Call) -> Iterable[str]:
    choices = [str(call.attributes["reduction"])]
    if call.attributes["label_smoothing"] != 0:
        choices.append("smoothing")
    return choices


_WEIGHT_OF_ROW = """
    class_weight = Reshape<allowzero=1>(weight, classes)
    some_class = Where(wrong, first, used)
    target_weight = Gather(class_weight, some_class)
    row_weight = Where(ignored, zero, target_weight)
"""

_COUNT_OF_ROW = """
    kept = Not(ignored)
    row_weight = Cast<to=$real>(kept)
"""

_ROW_GRAD = {
    "none": "row_grad = Reshape<allowzero=1>(grad, column)",
    "sum": """
        single = Constant<value_ints=[1, 1]>()
        row_grad = Reshape(grad, single)
    """,
    "mean": """
        single = Constant<value_ints=[1, 1]>()
        mean_grad = Reshape(grad, single)
        weight_sum = ReduceSum<keepdims=1>(row_weight)
        row_grad = Div(mean_grad, weight_sum)
    """,
}

# exp(x) - 1 at the target is 2 sinh(x / 2) exp(x / 2): the difference itself would cancel where the target is likely.
_TARGET = """
    size = Size(lp)
    class_step = Squeeze(classes)
    row_starts = Range(first, size, class_step)
    row_start = Reshape<allowzero=1>(row_starts, column)
    inside = Add(row_start, used)
    position = Where(wrong, size, inside)
    line = Constant<value_ints=[-1]>()
    flat = Reshape(lp, line)
    [target_out_of_range] target_lp = Gather(flat, position)
    least = Constant<value_float=-80.0>()
    unlikely = Less(target_lp, least)
    finite_lp = Where(unlikely, least, target_lp)
    half = Constant<value_float=0.5>()
    half_lp = Mul(finite_lp, half)
    half_exp = Exp(half_lp)
    half_sinh = Sinh(half_lp)
    half_expm1 = Mul(half_sinh, half_exp)
    expm1 = Add(half_expm1, half_expm1)
"""

_SHARP = """
    q = Mul(row_grad, row_weight)
    dense = Mul(p, q)
    at_target = Mul(q, expm1)
"""

_SMOOTH = """
    smoothing = Constant<value_float: float = @label_smoothing>()
    rest = Sub(one, smoothing)
    rest_grad = Mul(row_grad, rest)
    q = Mul(rest_grad, row_weight)
    class_count = Cast<to=$real>(classes)
    share = Div(smoothing, class_count)
    s = Mul(row_grad, share)
    s_total = Mul(s, total_weight)
    slope = Add(q, s_total)
    raised = Mul(p, slope)
    lowered = Mul(s, each_weight)
    dense = Sub(raised, lowered)
    target_p = Exp(target_lp)
    sharp_at_target = Mul(q, expm1)
    raised_at_target = Mul(target_p, s_total)
    lowered_at_target = Mul(s, weight_at_target)
    smooth_at_target = Sub(raised_at_target, lowered_at_target)
    at_target = Add(sharp_at_target, smooth_at_target)
"""

_SMOOTH_WEIGHTED = """
    total_weight = ReduceSum<keepdims=0>(class_weight)
    each_weight = Identity(class_weight)
    weight_at_target = Identity(target_weight)
"""

_SMOOTH_COUNTED = """
    total_weight = Cast<to=$real>(classes)
    each_weight = Identity(one)
    weight_at_target = Identity(one)
"""


def _body(variant: Variant) -> str:
    weighted = "weight" in variant.inputs
    (reduction,) = variant.choices.intersection(_REDUCTIONS)
    dense = _SHARP
    if "smoothing" in variant.choices:
        dense = (_SMOOTH_WEIGHTED if weighted else _SMOOTH_COUNTED) + _SMOOTH
    # A wrong target is steered to an index past the end, the one way to an error that standard operators have.
    return f"""
        lp = Cast<to=$real>(log_prob)
        grad = Cast<to=$real>(grad_loss)
        zero = Constant<value_float=0.0>()
        one = Constant<value_float=1.0>()
        first = Constant<value_int=0>()
        one_wide = Constant<value_ints=[1]>()
        rows = Shape<start=0, end=1>(lp)
        classes = Shape<start=1, end=2>(lp)
        column = Concat<axis=0>(rows, one_wide)
        label = Reshape<allowzero=1>(target, column)
        ignored_label = Constant<value_int: int = @ignore_index>()
        ignored = Equal(label, ignored_label)
        used = Where(ignored, first, label)
        negative = Less(used, first)
        too_large = GreaterOrEqual(used, classes)
        wrong = Or(negative, too_large)
        {_WEIGHT_OF_ROW if weighted else _COUNT_OF_ROW}
        {_ROW_GRAD[reduction]}
        {_TARGET}
        p = Exp(lp)
        {dense}
        patched = ScatterElements<axis=1>(dense, used, at_target)
        kept_rows = Where(ignored, zero, patched)
        grad_input = CastLike(kept_rows, log_prob)
    """


def _torch_outputs(grad_loss: torch.Tensor, log_prob: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return (log_prob.new_empty(log_prob.shape),)


OPERATOR = Operator(
    name="CrossEntropyLossGrad",
    stem="cross_entropy_loss_grad",
    doc=(
        "Gradient of cross entropy w.r.t. the logits. With p = exp(log_prob), w the weight (or ones), y the target "
        "and ls the label smoothing, row i is p (q_i + s_i sum(w)) - s_i w - q_i onehot(y_i), where "
        "q_i = g_i (1 - ls) w[y_i] and s_i = g_i ls / C; reduction mean divides both by the sum of w[y_i] over the "
        "rows that are not ignored. Ignored rows are 0; a target outside [0, C) is an error at run time."
    ),
    summary="cross entropy with respect to the logits: class weights, ignored rows, label smoothing",
    counterpart="autograd of `F.cross_entropy`",
    inputs=(
        Input("grad_loss", "T", "Gradient of the loss: () or (1) for mean and sum, (N) for none."),
        Input("log_prob", "T", "Log-softmax of the logits, (N, C), C > 0."),
        Input("target", "I", "Class of each row, (N).", holds=Classes("log_prob", 1, ignored="ignore_index")),
        Input("weight", "W", "Weight of each class, (C). Absent: all ones.", optional=True),
        Input("grad_zloss", "T", "Not supported: must be absent.", optional=True),
        Input("lse_for_zloss", "T", "Not supported: must be absent.", optional=True),
    ),
    outputs=(Output("grad_input", "Gradient w.r.t. the logits, (N, C)."),),
    attributes=(
        Attribute("reduction", "mean", "mean, sum or none."),
        Attribute("ignore_index", -100, "Target of the rows that do not count."),
        Attribute("label_smoothing", 0.0, "Share of the target which is spread over all classes, in [0, 1]."),
        Attribute("lse_square_scale_for_zloss", 0.0, "Scale of the z-loss; only 0 is supported."),
    ),
    constraints={"T": FLOAT_TYPES, "I": ("tensor(int64)",), "W": ("tensor(float)",)},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    samples=[{"reduction": reduction, "label_smoothing": s} for reduction in _REDUCTIONS for s in (0.0, 0.5)],
    spreads_nan=True,
)
