"""LinearCrossEntropy: cross entropy of a linear layer's results, with its gradients and without a tensor of logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops.cross_entropy_loss_grad import check_grad_loss, check_options
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
    type_string,
)

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    reduction = check_options(call)
    softcap = call.attributes["softcap"]
    if not (isinstance(softcap, float) and 0.0 <= softcap < math.inf):
        raise call.error("softcap", softcap, "0 or a positive number")
    call.output_mask(OPERATOR)
    dtype = OPERATOR.dtype(call)
    found = call.inputs["weight"].dtype if "weight" in call.inputs else TensorProto.UNDEFINED
    if TensorProto.UNDEFINED not in (found, dtype) and (found == TensorProto.DOUBLE) != (dtype == TensorProto.DOUBLE):
        wanted = TensorProto.DOUBLE if dtype == TensorProto.DOUBLE else TensorProto.FLOAT
        raise call.error("weight", type_string(found), f"{type_string(wanted)}, as input is {type_string(dtype)}")

    rows, features = call.shape("input", "N", "H")
    classes, width = call.shape("linear_weight", "C", "H")
    features = call.same("linear_weight", "H", features, width)
    if classes == 0:
        raise call.error("linear_weight", f"of shape {show((classes, features))}", "C > 0")
    rows = call.same("target", "N", rows, *call.shape("target", "N"))
    for name in ("linear_bias", "weight"):
        classes = call.same(name, "C", classes, *call.shape(name, "C"))
    if "grad_loss" in call.inputs:
        rows = check_grad_loss(call, reduction, rows)
    if "grad_logsumexp" in call.inputs:
        rows = call.same("grad_logsumexp", "N", rows, *call.shape("grad_logsumexp", "N"))
    loss: Shape = (rows,) if reduction == "none" else ()
    return call.masked(OPERATOR, (loss, (rows, features), (classes, features), (classes,), (rows,)))


def _choices(call: Call) -> Iterable[str]:
    yield str(call.attributes["reduction"])
    yield from call.wanted_outputs(OPERATOR)
    for name in ("label_smoothing", "softcap"):
        if call.attributes[name] != 0:
            yield name
    if OPERATOR.dtype(call) == TensorProto.DOUBLE:
        yield "double"


_REAL_INPUTS = """
    {name}_real = Cast<to=$real>({name})
"""

_WEIGHT_OF_ROW = """
    target_weight = Gather(weight, label)
    row_weight = Where(ignored, zero, target_weight)
    total_weight = ReduceSum<keepdims=0>(weight)
    each_weight = Identity(weight)
"""

_COUNT_OF_ROW = """
    row_weight = Where(ignored, zero, one)
    total_weight = Cast<to=$real>(classes)
    each_weight = Identity(one)
"""

# onnxruntime folds the quotient of a product into it, with an inverse of float32's digits; not that of a choice.
_CAPPED = """
    cap_float = Constant<value_float: float = @softcap>()
    cap = Cast<to=$real>(cap_float)
    ratio = Div(of_rows, cap)
    bounded = Tanh(ratio)
    logits = Mul(bounded, cap)
    square = Mul(bounded, bounded)
    slope = Sub(one, square)
"""

_SMOOTH_LOSS = """
    weighted_lp = Mul(lp, each_weight)
    weighted_sum = ReduceSum<keepdims=1>(weighted_lp, one_wide)
    smooth_loss = Mul(weighted_sum, share)
    sharp_loss = Mul(target_loss, rest)
    row_loss = Add(sharp_loss, smooth_loss)
"""

_REDUCED = {
    "none": """
        loss_real = Reshape<allowzero=1>(kept_loss, rows)
        scaled_grad = Identity(given_grad)
    """,
    "sum": """
        loss_real = ReduceSum<keepdims=0>(kept_loss)
        scaled_grad = Identity(given_grad)
    """,
    "mean": """
        loss_sum = ReduceSum<keepdims=0>(kept_loss)
        weight_sum = ReduceSum<keepdims=0>(row_weight)
        loss_real = Div(loss_sum, weight_sum)
        scaled_grad = Div(given_grad, weight_sum)
    """,
}

_SMOOTH_GRAD = """
    q_of_target = Mul(q, rest)
    s = Mul(scaled_grad, share)
    s_total = Mul(s, total_weight)
    slope_of_p = Sub(q_of_target, s_total)
    raised = Mul(p, slope_of_p)
    lowered = Mul(s, each_weight)
    dense = Add(raised, lowered)
"""


def _all_or_counted(name: str, value: str, takes_all_rows: bool) -> str:
    choice = f"Identity({value})" if takes_all_rows else f"Where(ignored, zero, {value})"
    return f"{name} = {choice}\n"


def _body(variant: Variant) -> str:
    wanted, given = variant.choices, variant.inputs
    takes_all_rows = "logsumexp" in wanted or "grad_logsumexp" in given
    smooths = "label_smoothing" in wanted
    (reduction,) = variant.choices.intersection(_REDUCED)
    text = "".join(_REAL_INPUTS.format(name=name) for name in ("input", "linear_weight"))
    # A wrong label is steered to an index past the end, the one way to an error that standard operators have.
    text += f"""
        zero_float = Constant<value_float=0.0>()
        zero = Cast<to=$real>(zero_float)
        one_float = Constant<value_float=1.0>()
        one = Cast<to=$real>(one_float)
        first = Constant<value_int=0>()
        step = Constant<value_int=1>()
        zero_wide = Constant<value_ints=[0]>()
        one_wide = Constant<value_ints=[1]>()
        no_numbers = ConstantOfShape(zero_wide)
        nothing = CastLike(no_numbers, input)
        rows = Shape<start=0, end=1>(input)
        class_count = Shape<start=0, end=1>(linear_weight)
        classes = Squeeze(class_count, zero_wide)
        column = Concat<axis=0>(rows, one_wide)
        labels = Reshape<allowzero=1>(target, column)
        ignored_label = Constant<value_int: int = @ignore_index>()
        ignored = Equal(labels, ignored_label)
        used = Where(ignored, first, labels)
        negative = Less(used, first)
        too_large = GreaterOrEqual(used, classes)
        wrong = Or(negative, too_large)
        position = Where(wrong, classes, used)
        class_numbers = Range(first, classes, step)
        [target_out_of_range] label = Gather(class_numbers, position)
        {_WEIGHT_OF_ROW if "weight" in given else _COUNT_OF_ROW}
        {_all_or_counted("x", "input_real", takes_all_rows)}
        turned_weight = Transpose<perm=[1, 0]>(linear_weight_real)
        linear = MatMul(x, turned_weight)
    """
    if "linear_bias" in given:
        text += """
            bias_real = Cast<to=$real>(linear_bias)
            products = Add(linear, bias_real)
        """
    else:
        text += "products = Identity(linear)\n"
    if "softcap" in wanted:
        # No row is wrong here: the choice is for what is said at _CAPPED.
        text += f"of_rows = Where({'wrong' if takes_all_rows else 'ignored'}, zero, products)\n{_CAPPED}"
    else:
        text += "logits = Identity(products)\n"
    text += """
        lp = LogSoftmax<axis=1>(logits)
        target_lp = GatherElements<axis=1>(lp, label)
        weighted_target_lp = Mul(target_lp, row_weight)
        target_loss = Neg(weighted_target_lp)
    """
    if smooths:
        text += """
            smoothing_float = Constant<value_float: float = @label_smoothing>()
            smoothing = Cast<to=$real>(smoothing_float)
            rest = Sub(one, smoothing)
            class_number = Cast<to=$real>(classes)
            positive_share = Div(smoothing, class_number)
            share = Neg(positive_share)
        """
    text += _SMOOTH_LOSS if smooths else "row_loss = Identity(target_loss)\n"
    text += "kept_loss = Where(ignored, zero, row_loss)\n"
    if "grad_loss" in given:
        shape = "column" if reduction == "none" else "one_wide"
        text += f"""
            grad_real = Cast<to=$real>(grad_loss)
            given_grad = Reshape<allowzero=1>(grad_real, {shape})
        """
    else:
        text += "given_grad = Identity(one)\n"
    text += _REDUCED[reduction]
    text += """
        q = Mul(scaled_grad, row_weight)
        p = Exp(lp)
    """
    text += _SMOOTH_GRAD if smooths else "q_of_target = Identity(q)\ndense = Mul(p, q)\n"
    text += """
        dense_at_target = GatherElements<axis=1>(dense, label)
        at_target = Sub(dense_at_target, q_of_target)
        patched = ScatterElements<axis=1>(dense, label, at_target)
    """
    of_logits = "patched"
    if takes_all_rows:
        text += "of_loss = Where(ignored, zero, patched)\n"
        of_logits = "of_loss"
    if "grad_logsumexp" in given:
        text += """
            grad_logsumexp_real = Cast<to=$real>(grad_logsumexp)
            grad_logsumexp_column = Reshape<allowzero=1>(grad_logsumexp_real, column)
            of_logsumexp = Mul(p, grad_logsumexp_column)
            of_both = Add(of_loss, of_logsumexp)
        """
        of_logits = "of_both"
    product = f"Mul({of_logits}, slope)" if "softcap" in wanted else f"Identity({of_logits})"
    text += f"of_products = {product}\n" + _all_or_counted("kept_grad", "of_products", takes_all_rows)
    largest = "largest_logit = ReduceMax<keepdims=1>(logits, one_wide)"
    if variant.opset < 18:
        largest = "largest_logit = ReduceMax<keepdims=1, axes=[1]>(logits)"
    results = {
        "loss": "loss_result = Identity(loss_real)\n",
        "grad_input": "grad_input_result = MatMul(kept_grad, linear_weight_real)\n",
        "grad_weight": """
            turned_grad = Transpose<perm=[1, 0]>(kept_grad)
            grad_weight_result = MatMul(turned_grad, x)
        """,
        "grad_bias": "grad_bias_result = ReduceSum<keepdims=0>(kept_grad, zero_wide)\n",
        "logsumexp": f"""
            {largest}
            unbounded = IsInf(largest_logit)
            shift = Where(unbounded, zero, largest_logit)
            shifted = Sub(logits, shift)
            powers = Exp(shifted)
            power_sum = ReduceSum<keepdims=1>(powers, one_wide)
            log_sum = Log(power_sum)
            logsumexp_column = Add(log_sum, shift)
            logsumexp_result = Reshape<allowzero=1>(logsumexp_column, rows)
        """,
    }
    for name, lines in results.items():
        if name in wanted:
            text += f"{lines}\n{name} = CastLike({name}_result, input)\n"
        else:
            text += f"{name} = Identity(nothing)\n"
    return text


def _torch_outputs(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    grad_loss: torch.Tensor | None = None,
    grad_logsumexp: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    output_mask: Sequence[bool] = (True, True, True, True, False),
) -> tuple[torch.Tensor, ...]:
    loss = target.shape if reduction == "none" else ()
    shapes = (loss, input.shape, linear_weight.shape, linear_weight.shape[:1], target.shape)
    return tuple(input.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, output_mask, strict=True))


OPERATOR = Operator(
    name="LinearCrossEntropy",
    stem="linear_cross_entropy",
    doc=(
        "Cross entropy of the results of a linear layer, and its gradients, which are known up to the factor "
        "grad_loss. With z = input linear_weight^T + linear_bias and logits z, or softcap tanh(z / softcap), the loss "
        "is that of cross_entropy(logits, target, weight, reduction, ignore_index, label_smoothing), and the gradients "
        "are those of its sum times grad_loss, and of logsumexp(logits) of each row times grad_logsumexp. Rows whose "
        "target is ignore_index have no part in the loss: theirs and its gradients are 0. Any other target outside "
        "[0, C) is an error at run time. The kernels keep no tensor of N x C."
    ),
    summary=(
        "cross entropy of a linear layer, with the loss: bias, softcap, class weights, ignored rows, smoothing, z-loss"
    ),
    counterpart="`F.linear_cross_entropy`, and its autograd",
    inputs=(
        Input("input", "T", "Input of the linear layer, (N, H)."),
        Input("linear_weight", "T", "Weight of the linear layer, (C, H), C > 0."),
        Input("target", "I", "Class of each row, (N).", holds=Classes("linear_weight", 0, ignored="ignore_index")),
        Input("linear_bias", "T", "Bias of the linear layer, (C). Absent: 0.", optional=True),
        Input(
            "weight",
            "W",
            "Weight of each class, (C), in double where input is. Absent: all ones.",
            optional=True,
        ),
        Input(
            "grad_loss",
            "T",
            "Gradient of the loss: () or (1) for mean and sum, (N) for none. Absent: 1.",
            optional=True,
        ),
        Input("grad_logsumexp", "T", "Gradient of logsumexp, (N). Absent: 0.", optional=True),
    ),
    outputs=(
        Output("loss", "The loss, () for mean and sum, (N) for none; (0) where it is not wanted."),
        Output("grad_input", "Gradient w.r.t. input, of its shape; (0) where it is not wanted."),
        Output("grad_weight", "Gradient w.r.t. linear_weight, of its shape; (0) where it is not wanted."),
        Output("grad_bias", "Gradient w.r.t. linear_bias, (C); (0) where it is not wanted."),
        Output(
            "logsumexp", "Log of the sum of the exponentials of each row's logits, (N); (0) where it is not wanted."
        ),
    ),
    attributes=(
        Attribute("reduction", "mean", "mean, sum or none."),
        Attribute("ignore_index", -100, "Target of the rows that do not count."),
        Attribute("label_smoothing", 0.0, "Share of the target which is spread over all classes, in [0, 1]."),
        Attribute("softcap", 0.0, "What the magnitude of logits stays below; 0: any."),
        Attribute("output_mask", (1, 1, 1, 1, 0), "Which of the outputs are wanted, in their order."),
    ),
    constraints={
        "T": (*FLOAT_TYPES, "tensor(double)"),
        "I": ("tensor(int64)",),
        "W": ("tensor(float)", "tensor(double)"),
    },
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    samples=[
        {"reduction": reduction, "label_smoothing": smoothing, "softcap": softcap}
        for reduction in _REDUCED
        for smoothing in (0.0, 0.5)
        for softcap in (0.0, 2.0)
    ],
    spreads_nan=True,
)
