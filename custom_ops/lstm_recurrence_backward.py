"""LstmRecurrenceBackward: the gradients of the input and the first states of LstmRecurrence."""

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
        grad_cell=("T", "N", "H"),
        initial_c=("N", "H"),
        cell=("T", "N", "H"),
        gates=("T", "N", "4 H"),
        weight=("4 H", "H"),
    )
    steps, items, units = (found[letter] for letter in "TNH")
    dtype = OPERATOR.dtype(call)
    state = Tensor(dtype, (items, units))
    return [Tensor(dtype, (steps, items, recurrence.times(4, units))), state, state]


def _body(variant: Variant) -> str:
    parts = recurrence.split(variant, 4)
    given = "grad_cell" in variant.inputs
    sequences = ["grad_hidden", *["grad_cell"] * given, "cell", "gates"]
    now = ", ".join(["grad_now", *["grad_cell_now"] * given, "before_now", "c", "activated"])
    scanned = ", ".join(
        ["grad_hidden_steps", *["grad_cell_steps"] * given, "before_steps", "cell_steps", "gates_steps"]
    )
    return f"""
        {recurrence.widened("initial_c", "weight", *sequences)}
        {recurrence.in_turn(variant, *sequences, backward=True)}
        {recurrence.states_before("cell", "initial_c")}
        grad_h_real, grad_c_real, grad_input_steps = Scan<
            num_scan_inputs={len(sequences) + 1},
            body=step (grad_later, grad_c_later, {now}) => (grad_earlier, grad_c_earlier, grad_gates) {{
                input_gate, forget_gate, new_cell, output_gate = {parts}(activated)
                shown = Tanh(c)
                grad_h = Add(grad_now, grad_later)
                grad_shown = Mul(grad_h, output_gate)
                shown_square = Mul(shown, shown)
                grad_shown_less = Mul(grad_shown, shown_square)
                grad_from_h = Sub(grad_shown, grad_shown_less)
                grad_of_c = {"Add(grad_cell_now, grad_c_later)" if given else "Identity(grad_c_later)"}
                grad_c = Add(grad_of_c, grad_from_h)
                grad_input_out = Mul(grad_c, new_cell)
                input_square = Mul(input_gate, input_gate)
                input_slope = Sub(input_gate, input_square)
                grad_input_gate = Mul(grad_input_out, input_slope)
                grad_forget_out = Mul(grad_c, before_now)
                forget_square = Mul(forget_gate, forget_gate)
                forget_slope = Sub(forget_gate, forget_square)
                grad_forget_gate = Mul(grad_forget_out, forget_slope)
                grad_new_out = Mul(grad_c, input_gate)
                new_square = Mul(new_cell, new_cell)
                grad_new_less = Mul(grad_new_out, new_square)
                grad_new = Sub(grad_new_out, grad_new_less)
                grad_output_out = Mul(grad_h, shown)
                output_square = Mul(output_gate, output_gate)
                output_slope = Sub(output_gate, output_square)
                grad_output_gate = Mul(grad_output_out, output_slope)
                grad_gates = Concat<axis=1>(grad_input_gate, grad_forget_gate, grad_new, grad_output_gate)
                grad_earlier = MatMul(grad_gates, weight_real)
                grad_c_earlier = Mul(grad_c, forget_gate)
            }}
        >(none, none, {scanned})
        {recurrence.in_place(variant, "grad_input", like="grad_hidden", backward=True)}
        grad_initial_h = CastLike(grad_h_real, grad_hidden)
        grad_initial_c = CastLike(grad_c_real, grad_hidden)
    """


def _torch_outputs(
    grad_hidden: torch.Tensor, grad_cell: torch.Tensor | None, initial_c: torch.Tensor, *others: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    gates = others[1]
    return tuple(grad_hidden.new_empty(shape) for shape in (gates.shape, initial_c.shape, initial_c.shape))


OPERATOR = recurrence.operator(
    name="LstmRecurrenceBackward",
    stem="lstm_recurrence_backward",
    doc=(
        "Gradients of the input and the first states of LstmRecurrence. From the last step on, with c' the cell before "
        "a step, and what comes from the steps behind it in dh and dc: dh = grad_hidden + dh; "
        "dc = grad_cell + dc + dh o (1 - tanh(c)^2); the parts of grad_input are dc g i (1 - i), dc c' f (1 - f), "
        "dc i (1 - g^2) and dh tanh(c) o (1 - o); and for the step before, dh = grad_input weight and dc = dc f."
    ),
    summary="the recurrence of an LSTM",
    counterpart="the backward pass of `torch.nn.LSTM` without that of its projections",
    inputs=(
        Input("grad_hidden", "T", "Gradient of hidden, (T, N, H)."),
        Input("grad_cell", "T", "Gradient of cell, (T, N, H). Absent: zeros.", optional=True),
        Input("initial_c", "T", "c before the first step, (N, H)."),
        Input("cell", "T", "c behind each step, (T, N, H)."),
        Input("gates", "T", "The gates i, f, g and o of each step, (T, N, 4 H)."),
        Input("weight", "T", "Weight of h in the gates, (4 H, H)."),
    ),
    outputs=(
        Output("grad_input", "Gradient of the projected input, (T, N, 4 H)."),
        Output("grad_initial_h", "Gradient of h before the first step, (N, H)."),
        Output("grad_initial_c", "Gradient of c before the first step, (N, H)."),
    ),
    infer=_infer,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
)
