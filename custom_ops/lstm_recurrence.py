"""LstmRecurrence: the recurrence of an LSTM (``torch.nn.LSTM``) whose input is projected already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradfuse.custom_ops import recurrence
from gradfuse.custom_ops.operator import Call, Input, Output, Tensor, TorchOp, Variant

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    call.flag("reverse")
    found = recurrence.sizes(
        call,
        input=("T", "N", "4 H"),
        initial_h=("N", "H"),
        initial_c=("N", "H"),
        weight=("4 H", "H"),
        bias=("4 H",),
    )
    steps, items, units = (found[letter] for letter in "TNH")
    dtype = OPERATOR.dtype(call)
    states = Tensor(dtype, (steps, items, units))
    return [states, states, Tensor(dtype, (steps, items, recurrence.times(4, units)))]


def _body(variant: Variant) -> str:
    parts = recurrence.split(variant, 4)
    biased = "bias" in variant.inputs
    return f"""
        {recurrence.widened("input", "initial_h", "initial_c", "weight", *["bias"] * biased)}
        {recurrence.in_turn(variant, "input", backward=False)}
        by_column = Transpose<perm=[1, 0]>(weight_real)
        last_h, last_c, hidden_steps, cell_steps, gates_steps = Scan<
            num_scan_inputs=1,
            body=step (h_before, c_before, now) => (h, c, kept_h, kept_c, activated) {{
                product = MatMul(h_before, by_column)
                shifted = {"Add(product, bias_real)" if biased else "Identity(product)"}
                sums = Add(now, shifted)
                input_sum, forget_sum, new_sum, output_sum = {parts}(sums)
                input_gate = Sigmoid(input_sum)
                forget_gate = Sigmoid(forget_sum)
                new_cell = Tanh(new_sum)
                output_gate = Sigmoid(output_sum)
                kept = Mul(forget_gate, c_before)
                added = Mul(input_gate, new_cell)
                c = Add(kept, added)
                shown = Tanh(c)
                h = Mul(output_gate, shown)
                kept_h = Identity(h)
                kept_c = Identity(c)
                activated = Concat<axis=1>(input_gate, forget_gate, new_cell, output_gate)
            }}
        >(initial_h_real, initial_c_real, input_steps)
        {recurrence.in_place(variant, "hidden", "cell", "gates", like="input", backward=False)}
    """


def _torch_outputs(input: torch.Tensor, initial_h: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    states = (*input.shape[:1], *initial_h.shape)
    return input.new_empty(states), input.new_empty(states), input.new_empty(input.shape)


def gradients(
    operator: Callable[..., tuple[torch.Tensor, ...]],
    ctx: Any,
    grad_hidden: torch.Tensor | None,
    grad_cell: torch.Tensor | None,
    _: None,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all inputs, with those of input and first states by an operator."""
    import torch

    initial_h, initial_c, weight, hidden, cell, gates = ctx.saved_tensors
    if grad_hidden is None:
        grad_hidden = torch.zeros_like(hidden)
    grad_input, grad_h, grad_c = operator(grad_hidden, grad_cell, initial_c, cell, gates, weight, ctx.reverse)
    return grad_input, grad_h, grad_c, *recurrence.weight_gradients(ctx, grad_input, hidden, initial_h), None


def _torch_backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    import torch

    return gradients(torch.ops.aclnn.lstm_recurrence_backward, ctx, grads[0], grads[1], None)


OPERATOR = recurrence.operator(
    name="LstmRecurrence",
    stem="lstm_recurrence",
    doc=(
        "The recurrence of an LSTM over T steps, of N items and H units, whose input is projected already, as "
        "torch.nn.LSTM computes it. At step t, with h and c of the step before: i, f, g and o are the four parts of "
        "input + h weight^T + bias, of which i, f and o are put through the sigmoid function and g through tanh; "
        "c = f c + i g; h = o tanh(c)."
    ),
    summary="(the steps of an LSTM themselves)",
    counterpart="`torch.nn.LSTM` without the projection of its input",
    inputs=(
        Input("input", "T", "Projected input of the gates i, f, g and o, (T, N, 4 H)."),
        Input("initial_h", "T", "h before the first step, (N, H)."),
        Input("initial_c", "T", "c before the first step, (N, H)."),
        Input("weight", "T", "Weight of h in the gates, (4 H, H)."),
        Input("bias", "T", "What is added to the gates, (4 H). Absent: zeros.", optional=True),
    ),
    outputs=(
        Output("hidden", "h behind each step, (T, N, H)."),
        Output("cell", "c behind each step, (T, N, H)."),
        Output("gates", "i, f, g and o of each step, (T, N, 4 H)."),
    ),
    infer=_infer,
    body=_body,
    torch_op=TorchOp(
        outputs=_torch_outputs,
        setup_context=recurrence.setup_context,
        backward=_torch_backward,
    ),
)
