"""GruRecurrenceBackward: the gradients of the input, the first state and the recurrent part of GruRecurrence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradfuse.custom_ops import recurrence
from gradfuse.custom_ops.operator import Call, Input, Output, Tensor, TorchOp, Variant

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    call.flag("reverse")
    found = recurrence.sizes(
        call,
        grad_hidden=("T", "N", "H"),
        initial_h=("N", "H"),
        hidden=("T", "N", "H"),
        gates=("T", "N", "4 H"),
        weight=("3 H", "H"),
    )
    steps, items, units = (found[letter] for letter in "TNH")
    dtype = OPERATOR.dtype(call)
    of_gates = Tensor(dtype, (steps, items, recurrence.times(3, units)))
    return [of_gates, Tensor(dtype, (items, units)), of_gates]


def _body(variant: Variant) -> str:
    sequences = ("grad_hidden", "hidden", "gates")
    return f"""
        {recurrence.widened("initial_h", "weight", *sequences)}
        {recurrence.in_turn(variant, *sequences, backward=True)}
        {recurrence.states_before("hidden", "initial_h")}
        grad_h_real, grad_input_steps, grad_recurrent_steps = Scan<
            num_scan_inputs=3,
            body=step (grad_later, grad_now, before_now, activated) => (grad_earlier, of_input, of_recurrent) {{
                reset, update, new_state, h_n = {recurrence.split(variant, 4)}(activated)
                grad_h = Add(grad_now, grad_later)
                moved = Sub(before_now, new_state)
                grad_update_out = Mul(grad_h, moved)
                update_square = Mul(update, update)
                update_slope = Sub(update, update_square)
                grad_update = Mul(grad_update_out, update_slope)
                grad_kept = Mul(grad_h, update)
                grad_new_out = Sub(grad_h, grad_kept)
                new_square = Mul(new_state, new_state)
                grad_new_less = Mul(grad_new_out, new_square)
                grad_new = Sub(grad_new_out, grad_new_less)
                grad_reset_out = Mul(grad_new, h_n)
                reset_square = Mul(reset, reset)
                reset_slope = Sub(reset, reset_square)
                grad_reset = Mul(grad_reset_out, reset_slope)
                grad_h_n = Mul(grad_new, reset)
                of_input = Concat<axis=1>(grad_reset, grad_update, grad_new)
                of_recurrent = Concat<axis=1>(grad_reset, grad_update, grad_h_n)
                grad_through = MatMul(of_recurrent, weight_real)
                grad_earlier = Add(grad_kept, grad_through)
            }}
        >(none, grad_hidden_steps, before_steps, gates_steps)
        {recurrence.in_place(variant, "grad_input", "grad_recurrent", like="grad_hidden", backward=True)}
        grad_initial_h = CastLike(grad_h_real, grad_hidden)
    """


def _torch_outputs(grad_hidden: torch.Tensor, initial_h: torch.Tensor, *others: object) -> tuple[torch.Tensor, ...]:
    of_gates = (*grad_hidden.shape[:-1], *(3 * units for units in grad_hidden.shape[-1:]))
    return tuple(grad_hidden.new_empty(shape) for shape in (of_gates, initial_h.shape, of_gates))


OPERATOR = recurrence.operator(
    name="GruRecurrenceBackward",
    stem="gru_recurrence_backward",
    doc=(
        "Gradients of the input, the first state and the recurrent part, h weight^T + bias, of GruRecurrence. From the "
        "last step on, with h' the state before a step, and what comes from the steps behind it in dh: "
        "dh = grad_hidden + dh; dn = dh (1 - z) (1 - n^2); the parts of grad_input are dn h_n r (1 - r), "
        "dh (h' - n) z (1 - z) and dn, and those of grad_recurrent the same but for dn r in the place of dn; and for "
        "the step before, dh = dh z + grad_recurrent weight."
    ),
    summary="the recurrence of a GRU",
    counterpart="the backward pass of `torch.nn.GRU` without that of its projections",
    inputs=(
        Input("grad_hidden", "T", "Gradient of hidden, (T, N, H)."),
        Input("initial_h", "T", "h before the first step, (N, H)."),
        Input("hidden", "T", "h behind each step, (T, N, H)."),
        Input("gates", "T", "r, z, n and h_n of each step, (T, N, 4 H)."),
        Input("weight", "T", "Weight of h in the gates, (3 H, H)."),
    ),
    outputs=(
        Output("grad_input", "Gradient of the projected input, (T, N, 3 H)."),
        Output("grad_initial_h", "Gradient of h before the first step, (N, H)."),
        Output("grad_recurrent", "Gradient of the recurrent part of the gates, (T, N, 3 H)."),
    ),
    infer=_infer,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
)
