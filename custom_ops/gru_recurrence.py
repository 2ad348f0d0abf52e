"""GruRecurrence: the recurrence of a GRU (``torch.nn.GRU``) whose input is projected already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradfuse.custom_ops import recurrence
from gradfuse.custom_ops.operator import Call, Input, Output, Tensor, TorchOp, Variant

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    call.flag("reverse")
    found = recurrence.sizes(call, input=("T", "N", "3 H"), initial_h=("N", "H"), weight=("3 H", "H"), bias=("3 H",))
    steps, items, units = (found[letter] for letter in "TNH")
    dtype = OPERATOR.dtype(call)
    return [Tensor(dtype, (steps, items, units)), Tensor(dtype, (steps, items, recurrence.times(4, units)))]


def _body(variant: Variant) -> str:
    parts = recurrence.split(variant, 3)
    biased = "bias" in variant.inputs
    return f"""
        {recurrence.widened("input", "initial_h", "weight", *["bias"] * biased)}
        {recurrence.in_turn(variant, "input", backward=False)}
        by_column = Transpose<perm=[1, 0]>(weight_real)
        last_h, hidden_steps, gates_steps = Scan<
            num_scan_inputs=1,
            body=step (h_before, now) => (h, kept_h, activated) {{
                product = MatMul(h_before, by_column)
                recurrent = {"Add(product, bias_real)" if biased else "Identity(product)"}
                x_r, x_z, x_n = {parts}(now)
                h_r, h_z, h_n = {parts}(recurrent)
                reset_sum = Add(x_r, h_r)
                reset = Sigmoid(reset_sum)
                update_sum = Add(x_z, h_z)
                update = Sigmoid(update_sum)
                gated = Mul(reset, h_n)
                new_sum = Add(x_n, gated)
                new_state = Tanh(new_sum)
                difference = Sub(h_before, new_state)
                kept = Mul(update, difference)
                h = Add(new_state, kept)
                kept_h = Identity(h)
                activated = Concat<axis=1>(reset, update, new_state, h_n)
            }}
        >(initial_h_real, input_steps)
        {recurrence.in_place(variant, "hidden", "gates", like="input", backward=False)}
    """


def _torch_outputs(input: torch.Tensor, initial_h: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    states = (*input.shape[:1], *initial_h.shape)
    return input.new_empty(states), input.new_empty((*states[:-1], *(4 * units for units in states[-1:])))


def gradients(
    operator: Callable[..., tuple[torch.Tensor, ...]], ctx: Any, grad_hidden: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all inputs, with those of input, first state and recurrent part by an operator."""
    if grad_hidden is None:
        return (None,) * 5
    initial_h, weight, hidden, gates = ctx.saved_tensors
    grad_input, grad_h, grad_recurrent = operator(grad_hidden, initial_h, hidden, gates, weight, ctx.reverse)
    return grad_input, grad_h, *recurrence.weight_gradients(ctx, grad_recurrent, hidden, initial_h), None


def _torch_backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    import torch

    return gradients(torch.ops.aclnn.gru_recurrence_backward, ctx, grads[0], None)


OPERATOR = recurrence.operator(
    name="GruRecurrence",
    stem="gru_recurrence",
    doc=(
        "The recurrence of a GRU over T steps, of N items and H units, whose input is projected already, as "
        "torch.nn.GRU computes it. At step t, with h of the step before, x_r, x_z and x_n the three parts of input, "
        "and h_r, h_z and h_n those of h weight^T + bias: r = sigmoid(x_r + h_r); z = sigmoid(x_z + h_z); "
        "n = tanh(x_n + r h_n); h = n + z (h - n)."
    ),
    summary="(the steps of a GRU themselves)",
    counterpart="`torch.nn.GRU` without the projection of its input",
    inputs=(
        Input("input", "T", "Projected input of the gates r, z and n, (T, N, 3 H)."),
        Input("initial_h", "T", "h before the first step, (N, H)."),
        Input("weight", "T", "Weight of h in the gates, (3 H, H)."),
        Input("bias", "T", "Bias of h in the gates, (3 H). Absent: zeros.", optional=True),
    ),
    outputs=(
        Output("hidden", "h behind each step, (T, N, H)."),
        Output("gates", "r, z, n and h_n of each step, (T, N, 4 H)."),
    ),
    infer=_infer,
    body=_body,
    torch_op=TorchOp(
        outputs=_torch_outputs,
        setup_context=recurrence.setup_context,
        backward=_torch_backward,
    ),
)
