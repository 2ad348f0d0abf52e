"""GRU and LSTM layers as one operator each way, for sequences of any length: their steps are an ONNX Scan.

PyTorch traces a recurrent layer step by step, which fixes the length of its sequences. Under `scanned()` the steps of a
layer are one operator, `torch.ops.gradfuse.gru_steps` or `lstm_steps`, and their backward passes are operators too.
Everything else (the projection of the input, gradients of the weights) is matrix products over the whole sequence.
`translations()` has the ONNX text of each operator. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse.export.translation import function_caller

_Tensors = tuple[Tensor, ...]


@torch.library.custom_op("gradfuse::gru_steps", mutates_args=())
def gru_steps(x: Tensor, first: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The steps of a GRU (torch.nn.GRU's formula), whose input is projected already.

    Args:
        x: (T, N, 3 H), the projected input of the reset, update and new gates.
        first: (N, H), the state before the first step.
        weight: (3 H, H), the weight of the state.
        bias: (3 H), the bias of the state.

    Returns:
        The states (T, N, H); and (T, N, 4 H), the three gates and what the reset gate was multiplied with.
    """
    states, saved, state = [], [], first
    for step in x:
        reset_x, update_x, new_x = step.chunk(3, -1)
        reset_h, update_h, new_h = (state @ weight.T + bias).chunk(3, -1)
        reset, update = torch.sigmoid(reset_x + reset_h), torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + reset * new_h)
        state = new + update * (state - new)
        states.append(state)
        saved.append(torch.cat([reset, update, new, new_h], -1))
    return torch.stack(states), torch.stack(saved)


@torch.library.custom_op("gradfuse::gru_steps_backward", mutates_args=())
def gru_steps_backward(grad: Tensor, before: Tensor, saved: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the first state of `gru_steps`.

    Args:
        grad: (T, N, H), the gradient of the states.
        before: (T, N, H), the state before each step.
        saved, weight: as in `gru_steps`.
    """
    grad_state, grads = torch.zeros_like(before[0]), []
    for t in reversed(range(grad.shape[0])):
        reset, update, new, new_h = saved[t].chunk(4, -1)
        grad_state = grad[t] + grad_state
        grad_update = grad_state * (before[t] - new) * (update - update * update)
        grad_new = (grad_state - grad_state * update) * (1 - new * new)
        grad_reset = grad_new * new_h * (reset - reset * reset)
        grads.append(torch.cat([grad_reset, grad_update, grad_new], -1))
        grad_state = grad_state * update + torch.cat([grad_reset, grad_update, grad_new * reset], -1) @ weight
    return torch.stack(grads[::-1]), grad_state


@torch.library.custom_op("gradfuse::lstm_steps", mutates_args=())
def lstm_steps(
    x: Tensor, first: Tensor, first_cell: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The steps of an LSTM (torch.nn.LSTM's formula), whose input is projected already.

    Args:
        x: (T, N, 4 H), the projected input of the input, forget, cell and output gates.
        first, first_cell: (N, H), state and cell before the first step.
        weight: (4 H, H), the weight of the state.
        bias: (4 H), the bias of the state.

    Returns:
        The states (T, N, H), the cells (T, N, H) and the gates (T, N, 4 H).
    """
    states, cells, saved, state, cell = [], [], [], first, first_cell
    for step in x:
        enter, forget, new, leave = (step + state @ weight.T + bias).chunk(4, -1)
        enter, forget, leave = torch.sigmoid(enter), torch.sigmoid(forget), torch.sigmoid(leave)
        new = torch.tanh(new)
        cell = forget * cell + enter * new
        state = leave * torch.tanh(cell)
        states.append(state)
        cells.append(cell)
        saved.append(torch.cat([enter, forget, new, leave], -1))
    return torch.stack(states), torch.stack(cells), torch.stack(saved)


@torch.library.custom_op("gradfuse::lstm_steps_backward", mutates_args=())
def lstm_steps_backward(
    grad: Tensor, grad_cells: Tensor, before: Tensor, cells: Tensor, saved: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the first state and of the first cell of `lstm_steps`.

    Args:
        grad, grad_cells: (T, N, H), the gradients of states and cells.
        before: (T, N, H), the cell before each step.
        cells, saved, weight: as in `lstm_steps`.
    """
    grad_state, grad_cell, grads = torch.zeros_like(before[0]), torch.zeros_like(before[0]), []
    for t in reversed(range(grad.shape[0])):
        enter, forget, new, leave = saved[t].chunk(4, -1)
        shown = torch.tanh(cells[t])
        grad_state = grad[t] + grad_state
        grad_shown = grad_state * leave
        grad_cell = grad_cells[t] + grad_cell + (grad_shown - grad_shown * shown * shown)
        grad_enter = grad_cell * new * (enter - enter * enter)
        grad_forget = grad_cell * before[t] * (forget - forget * forget)
        grad_new = grad_cell * enter * (1 - new * new)
        grad_leave = grad_state * shown * (leave - leave * leave)
        grads.append(torch.cat([grad_enter, grad_forget, grad_new, grad_leave], -1))
        grad_state, grad_cell = grads[-1] @ weight, grad_cell * forget
    return torch.stack(grads[::-1]), grad_state, grad_cell


def _before(states: Tensor, first: Tensor) -> Tensor:
    return torch.cat([first.unsqueeze(0), states[:-1]])


def _weight_gradients(grad_gates: Tensor, before: Tensor) -> _Tensors:
    rows = grad_gates.flatten(0, 1)
    return rows.T @ before.flatten(0, 1), rows.sum(0)


def _gru_context(ctx: Any, inputs: _Tensors, output: _Tensors) -> None:
    ctx.save_for_backward(inputs[1], inputs[2], *output)


def _gru_gradients(ctx: Any, grad: Tensor, _: Tensor) -> _Tensors:
    first, weight, states, saved = ctx.saved_tensors
    before = _before(states, first)
    grad_x, grad_first = torch.ops.gradfuse.gru_steps_backward(grad, before, saved, weight)
    size = first.shape[-1]
    # The state's part of the new gate is behind the reset gate.
    grad_gates = torch.cat([grad_x[..., : 2 * size], grad_x[..., 2 * size :] * saved[..., :size]], -1)
    return grad_x, grad_first, *_weight_gradients(grad_gates, before)


def _lstm_context(ctx: Any, inputs: _Tensors, output: _Tensors) -> None:
    ctx.save_for_backward(*inputs[1:4], *output)


def _lstm_gradients(ctx: Any, grad: Tensor, grad_cells: Tensor, _: Tensor) -> _Tensors:
    first, first_cell, weight, states, cells, saved = ctx.saved_tensors
    grad_x, grad_first, grad_first_cell = torch.ops.gradfuse.lstm_steps_backward(
        grad, grad_cells, _before(cells, first_cell), cells, saved, weight
    )
    return grad_x, grad_first, grad_first_cell, *_weight_gradients(grad_x, _before(states, first))


gru_steps.register_fake(lambda x, first, *_: (_like(x, first, 1), _like(x, first, 4)))
gru_steps.register_autograd(_gru_gradients, setup_context=_gru_context)
gru_steps_backward.register_fake(lambda grad, before, *_: (_like(grad, before[0], 3), torch.empty_like(before[0])))
lstm_steps.register_fake(lambda x, first, *_: (_like(x, first, 1), _like(x, first, 1), _like(x, first, 4)))
lstm_steps.register_autograd(_lstm_gradients, setup_context=_lstm_context)
lstm_steps_backward.register_fake(
    lambda grad, _, before, *__: (
        _like(grad, before[0], 4),
        torch.empty_like(before[0]),
        torch.empty_like(before[0]),
    )
)


def _like(sequence: Tensor, state: Tensor, gates: int) -> Tensor:
    return state.new_empty((sequence.shape[0], state.shape[0], gates * state.shape[1]))


@contextmanager
def scanned() -> Iterator[None]:
    """Let GRU and LSTM layers that are called under it be traced as `gru_steps` and `lstm_steps`.

    Packed sequences and projections of the state (`proj_size`) stay as they are.
    """
    with _Scanned():
        yield


class _Scanned(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layers: dict[str, Callable[..., _Tensors]] = {"gru": _gru, "lstm": _lstm}
        layer = layers.get(getattr(func, "__name__", ""))
        # A packed sequence comes with its batch sizes in the place of the first state.
        if layer is not None and not kwargs and len(args) == 9 and isinstance(args[3], bool):
            first = args[1]
            if layer is _gru or first[0].shape[-1] == first[1].shape[-1]:
                return layer(*args)
        return func(*args, **(kwargs or {}))


def _gru(x: Tensor, first: Tensor, *settings: Any) -> _Tensors:
    def steps(projected: Tensor, at: int, weight: Tensor, bias: Tensor) -> _Tensors:
        return (torch.ops.gradfuse.gru_steps(projected, first[at].to(projected.dtype), weight, bias)[0],)

    states, (last,) = _stacked(x, steps, *settings)
    return states, last


def _lstm(x: Tensor, first: Sequence[Tensor], *settings: Any) -> _Tensors:
    def steps(projected: Tensor, at: int, weight: Tensor, bias: Tensor) -> _Tensors:
        state, cell = (one[at].to(projected.dtype) for one in first)
        return torch.ops.gradfuse.lstm_steps(projected, state, cell, weight, bias)[:2]  # type: ignore[no-any-return]

    states, last = _stacked(x, steps, *settings)
    return states, *last


def _stacked(
    x: Tensor,
    steps: Callable[[Tensor, int, Tensor, Tensor], _Tensors],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Run a sequence through all layers; return the result and the last states of each layer and direction, stacked."""
    each = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    x = x.transpose(0, 1) if batch_first else x
    last: list[_Tensors] = []
    for layer in range(layers):
        if layer:
            x = torch.nn.functional.dropout(x, dropout, train)
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            of_input, of_state, *biases = weights[each * at : each * (at + 1)]
            input_bias, state_bias = biases or (None, of_state.new_zeros(of_state.shape[0]))
            sequence = x.flip(0) if direction else x
            projected = torch.nn.functional.linear(sequence, of_input, input_bias)
            # Under autocast the projection is narrower than the weights.
            states = steps(projected, at, of_state.to(projected.dtype), state_bias.to(projected.dtype))
            last.append(tuple(one[-1] for one in states))
            outputs.append(states[0].flip(0) if direction else states[0])
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    x = x.transpose(0, 1) if batch_first else x
    return x, [torch.stack(one) for one in zip(*last, strict=True)]


_GRU = """
GruSteps (x, first, weight, bias) => (states, saved) {
    by_column = Transpose<perm=[1, 0]>(weight)
    last, states, saved = Scan<num_scan_inputs=1, body=step (before, now) => (state, kept_state, gates) {
        product = MatMul(before, by_column)
        hidden = Add(product, bias)
        reset_x, update_x, new_x = Split<axis=1, num_outputs=3>(now)
        reset_h, update_h, new_h = Split<axis=1, num_outputs=3>(hidden)
        reset_sum = Add(reset_x, reset_h)
        reset = Sigmoid(reset_sum)
        update_sum = Add(update_x, update_h)
        update = Sigmoid(update_sum)
        gated = Mul(reset, new_h)
        new_sum = Add(new_x, gated)
        new = Tanh(new_sum)
        difference = Sub(before, new)
        kept = Mul(update, difference)
        state = Add(new, kept)
        kept_state = Identity(state)
        gates = Concat<axis=1>(reset, update, new, new_h)
    }>(first, x)
}
"""

_GRU_BACKWARD = """
GruStepsBackward (grad, before, saved, weight) => (grad_x, grad_first) {
    no_grad_shape = Shape<start=1>(before)
    zero_float = Constant<value_float=0.0>()
    zero = CastLike(zero_float, grad)
    no_grad = Expand(zero, no_grad_shape)
    grad_first, grad_x = Scan<
        num_scan_inputs=3,
        scan_input_directions=[1, 1, 1],
        scan_output_directions=[1],
        body=step (later, grad_now, before_now, gates) => (earlier, grad_gates) {
            reset, update, new, new_h = Split<axis=1, num_outputs=4>(gates)
            grad_state = Add(grad_now, later)
            moved = Sub(before_now, new)
            grad_update_out = Mul(grad_state, moved)
            update_square = Mul(update, update)
            update_slope = Sub(update, update_square)
            grad_update = Mul(grad_update_out, update_slope)
            grad_kept = Mul(grad_state, update)
            grad_new_out = Sub(grad_state, grad_kept)
            new_square = Mul(new, new)
            grad_new_less = Mul(grad_new_out, new_square)
            grad_new = Sub(grad_new_out, grad_new_less)
            grad_reset_out = Mul(grad_new, new_h)
            reset_square = Mul(reset, reset)
            reset_slope = Sub(reset, reset_square)
            grad_reset = Mul(grad_reset_out, reset_slope)
            grad_gates = Concat<axis=1>(grad_reset, grad_update, grad_new)
            grad_new_h = Mul(grad_new, reset)
            grad_hidden = Concat<axis=1>(grad_reset, grad_update, grad_new_h)
            grad_through = MatMul(grad_hidden, weight)
            earlier = Add(grad_kept, grad_through)
        }
    >(no_grad, grad, before, saved)
}
"""

_LSTM = """
LstmSteps (x, first, first_cell, weight, bias) => (states, cells, saved) {
    by_column = Transpose<perm=[1, 0]>(weight)
    last, last_cell, states, cells, saved = Scan<
        num_scan_inputs=1,
        body=step (before, cell_before, now) => (state, cell, kept_state, kept_cell, gates) {
            product = MatMul(before, by_column)
            hidden = Add(product, bias)
            sums = Add(now, hidden)
            enter_sum, forget_sum, new_sum, leave_sum = Split<axis=1, num_outputs=4>(sums)
            enter = Sigmoid(enter_sum)
            forget = Sigmoid(forget_sum)
            new = Tanh(new_sum)
            leave = Sigmoid(leave_sum)
            kept = Mul(forget, cell_before)
            added = Mul(enter, new)
            cell = Add(kept, added)
            shown = Tanh(cell)
            state = Mul(leave, shown)
            kept_state = Identity(state)
            kept_cell = Identity(cell)
            gates = Concat<axis=1>(enter, forget, new, leave)
        }
    >(first, first_cell, x)
}
"""

_LSTM_BACKWARD = """
LstmStepsBackward (grad, grad_cells, before, cells, saved, weight) => (grad_x, grad_first, grad_first_cell) {
    no_grad_shape = Shape<start=1>(before)
    zero_float = Constant<value_float=0.0>()
    zero = CastLike(zero_float, grad)
    no_grad = Expand(zero, no_grad_shape)
    grad_first, grad_first_cell, grad_x = Scan<
        num_scan_inputs=5,
        scan_input_directions=[1, 1, 1, 1, 1],
        scan_output_directions=[1],
        body=step (later, cell_later, grad_now, grad_cell_now, before_now, cell, gates)
            => (earlier, cell_earlier, grad_gates) {
            enter, forget, new, leave = Split<axis=1, num_outputs=4>(gates)
            shown = Tanh(cell)
            grad_state = Add(grad_now, later)
            grad_shown = Mul(grad_state, leave)
            shown_square = Mul(shown, shown)
            grad_shown_less = Mul(grad_shown, shown_square)
            grad_from_state = Sub(grad_shown, grad_shown_less)
            grad_of_cell = Add(grad_cell_now, cell_later)
            grad_cell = Add(grad_of_cell, grad_from_state)
            grad_enter_out = Mul(grad_cell, new)
            enter_square = Mul(enter, enter)
            enter_slope = Sub(enter, enter_square)
            grad_enter = Mul(grad_enter_out, enter_slope)
            grad_forget_out = Mul(grad_cell, before_now)
            forget_square = Mul(forget, forget)
            forget_slope = Sub(forget, forget_square)
            grad_forget = Mul(grad_forget_out, forget_slope)
            grad_new_out = Mul(grad_cell, enter)
            new_square = Mul(new, new)
            grad_new_less = Mul(grad_new_out, new_square)
            grad_new = Sub(grad_new_out, grad_new_less)
            grad_leave_out = Mul(grad_state, shown)
            leave_square = Mul(leave, leave)
            leave_slope = Sub(leave, leave_square)
            grad_leave = Mul(grad_leave_out, leave_slope)
            grad_gates = Concat<axis=1>(grad_enter, grad_forget, grad_new, grad_leave)
            earlier = MatMul(grad_gates, weight)
            cell_earlier = Mul(grad_cell, forget)
        }
    >(no_grad, no_grad, grad, grad_cells, before, cells, saved)
}
"""


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the functions that emit the operators' nodes, by overload, for `custom_translation_table`."""
    steps = torch.ops.gradfuse
    texts = {
        steps.gru_steps.default: _GRU,
        steps.gru_steps_backward.default: _GRU_BACKWARD,
        steps.lstm_steps.default: _LSTM,
        steps.lstm_steps_backward.default: _LSTM_BACKWARD,
    }
    return {overload: function_caller(text) for overload, text in texts.items()}
