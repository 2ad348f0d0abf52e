"""GRU and LSTM layers as one operator each way, for sequences of any length: their steps are an ONNX Scan.

PyTorch traces a recurrent layer step by step, which fixes the length of its sequences. Under `scanned()` the steps of a
layer are one operator, `torch.ops.gradfuse.gru_steps` or `lstm_steps`, and their backward passes are operators too.
Everything else (the projection of the input, gradients of the weights) is matrix products over the whole sequence.
`translations()` has the ONNX text of each operator. This module imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from gradfuse.custom_ops import OPS, lstm_recurrence, recurrence
from gradfuse.custom_ops.operator import Variant
from gradfuse.export.translation import OPSET_OF_FUNCTIONS, caller, function_caller
from gradfuse.torch.ops import register_ops

_Tensors = tuple[Tensor, ...]

register_ops()


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
    input: Tensor, initial_h: Tensor, initial_c: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What `torch.ops.aclnn.lstm_recurrence` computes, of any floating-point type."""
    results, h, c = [], initial_h, initial_c
    for step in input.flip(0) if reverse else input:
        i, f, g, o = (step + torch.nn.functional.linear(h, weight, bias)).chunk(4, -1)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        c = f * c + i * g
        h = o * torch.tanh(c)
        results.append((h, c, torch.cat([i, f, g, o], -1)))
    hidden, cell, gates = (torch.stack(one[::-1] if reverse else one) for one in zip(*results, strict=True))
    return hidden, cell, gates


@torch.library.custom_op("gradfuse::lstm_steps_backward", mutates_args=())
def lstm_steps_backward(
    grad_hidden: Tensor,
    grad_cell: Tensor | None,
    initial_c: Tensor,
    cell: Tensor,
    gates: Tensor,
    weight: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `torch.ops.aclnn.lstm_recurrence_backward` computes, of any floating-point type."""
    before = recurrence.before(cell, initial_c, reverse)
    grad_h, grad_c, grads = torch.zeros_like(initial_c), torch.zeros_like(initial_c), []
    order = range(len(cell))
    for t in order if reverse else reversed(order):
        i, f, g, o = gates[t].chunk(4, -1)
        shown = torch.tanh(cell[t])
        grad_h = grad_hidden[t] + grad_h
        grad_c = grad_c + grad_h * o * (1 - shown * shown)
        grad_c = grad_c if grad_cell is None else grad_c + grad_cell[t]
        of_gates = grad_c * g * (i - i * i), grad_c * before[t] * (f - f * f), grad_c * i * (1 - g * g)
        grads.append(torch.cat([*of_gates, grad_h * shown * (o - o * o)], -1))
        grad_h, grad_c = grads[-1] @ weight, grad_c * f
    return torch.stack(grads if reverse else grads[::-1]), grad_h, grad_c


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


gru_steps.register_fake(lambda x, first, *_: (_like(x, first, 1), _like(x, first, 4)))
gru_steps.register_autograd(_gru_gradients, setup_context=_gru_context)
gru_steps_backward.register_fake(lambda grad, before, *_: (_like(grad, before[0], 3), torch.empty_like(before[0])))
lstm_steps.register_fake(OPS["LstmRecurrence"].torch_op.outputs)
lstm_steps_backward.register_fake(OPS["LstmRecurrenceBackward"].torch_op.outputs)
lstm_steps.register_autograd(
    functools.partial(lstm_recurrence.gradients, torch.ops.gradfuse.lstm_steps_backward),
    setup_context=OPS["LstmRecurrence"].torch_op.setup_context,
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
    def steps(projected: Tensor, at: int, weight: Tensor, bias: Tensor | None, reverse: bool) -> _Tensors:
        added = weight.new_zeros(weight.shape[0]) if bias is None else bias
        turned = projected.flip(0) if reverse else projected
        states = torch.ops.gradfuse.gru_steps(turned, first[at].to(projected.dtype), weight, added)[0]
        return (states.flip(0) if reverse else states,)

    states, (last,) = _stacked(x, steps, *settings)
    return states, last


def _lstm(x: Tensor, first: Sequence[Tensor], *settings: Any) -> _Tensors:
    def steps(projected: Tensor, at: int, weight: Tensor, bias: Tensor | None, reverse: bool) -> _Tensors:
        state, cell = (one[at].to(projected.dtype) for one in first)
        results: _Tensors = torch.ops.gradfuse.lstm_steps(projected, state, cell, weight, bias, reverse)
        return results[:2]

    states, last = _stacked(x, steps, *settings)
    return states, *last


def _stacked(
    x: Tensor,
    steps: Callable[[Tensor, int, Tensor, Tensor | None, bool], _Tensors],
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
            input_bias, state_bias = biases or (None, None)
            projected = torch.nn.functional.linear(x, of_input, input_bias)
            # Under autocast the projection is narrower than the weights.
            weight, bias = (None if one is None else one.to(projected.dtype) for one in (of_state, state_bias))
            assert weight is not None
            states = steps(projected, at, weight, bias, direction == 1)
            last.append(tuple(one[0 if direction else -1] for one in states))
            outputs.append(states[0])
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

_FUSED = {
    torch.ops.gradfuse.lstm_steps.default: "LstmRecurrence",
    torch.ops.gradfuse.lstm_steps_backward.default: "LstmRecurrenceBackward",
}
"""The operators of the domain `aclnn` with the same arguments and results, by the overloads that are traced."""


def fuse_recurrences(program: ExportedProgram) -> None:
    """Put `aclnn::lstm_recurrence` and the like into a traced program, where their types are those of the kernels."""
    for node in program.graph.nodes:
        if node.target in _FUSED and node.args[0].meta["val"].dtype in _KERNEL_TYPES:
            node.target = getattr(torch.ops.aclnn, OPS[_FUSED[node.target]].stem).default
    program.graph_module.recompile()


_KERNEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the functions that emit the operators' nodes, by overload, for `custom_translation_table`."""
    steps = torch.ops.gradfuse
    texts = {steps.gru_steps.default: _GRU, steps.gru_steps_backward.default: _GRU_BACKWARD}
    return {
        **{overload: function_caller(text) for overload, text in texts.items()},
        **{overload: _body_caller(name) for overload, name in _FUSED.items()},
    }


def _body_caller(name: str) -> Callable[..., Any]:
    """Return a translation that calls the body of an operator of the domain `aclnn`."""
    operator = OPS[name]

    def call(*arguments: Any) -> Any:
        import onnx_ir as ir

        *inputs, reverse = arguments
        while inputs[-1] is None:
            inputs.pop()
        words = {"reverse": reverse, "double": inputs[0].dtype == ir.DataType.DOUBLE}
        present = tuple(given.name for given, one in zip(operator.inputs, inputs, strict=False) if one is not None)
        chosen = frozenset(word for word in words if words[word])
        function = operator.function(Variant(OPSET_OF_FUNCTIONS, present, chosen))
        function.name = "_".join([name, *sorted(chosen), "of", *present])
        return caller(function)(*inputs)

    return call
