"""GRU and LSTM layers as one operator per direction, for sequences of any length.

PyTorch traces a recurrent layer step by step, which fixes the length of its sequences. Under `scanned()` the steps of a
layer are one operator, `torch.ops.gradfuse.gru_steps` or `lstm_steps`, and their backward passes are operators too.
Everything else (the projection of the input, gradients of the weights) is matrix products over the whole sequence.
`fuse_recurrences` puts `aclnn::gru_recurrence` and the like in their place; `translations()` has their function bodies,
ONNX Scans, for programs that stay without. This module imports torch.
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

from gradfuse.custom_ops import OPS, gru_recurrence, lstm_recurrence, recurrence
from gradfuse.custom_ops.operator import Variant
from gradfuse.export.packed_sequences import Pack, pack_of
from gradfuse.export.translation import OPSET_OF_FUNCTIONS, caller
from gradfuse.torch.ops import register_ops

_Tensors = tuple[Tensor, ...]

register_ops()


@torch.library.custom_op("gradfuse::gru_steps", mutates_args=())
def gru_steps(
    input: Tensor, initial_h: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """What `torch.ops.aclnn.gru_recurrence` computes, of any floating-point type."""
    results, h = [], initial_h
    for step in input.flip(0) if reverse else input:
        x_r, x_z, x_n = step.chunk(3, -1)
        h_r, h_z, h_n = torch.nn.functional.linear(h, weight, bias).chunk(3, -1)
        r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * h_n)
        h = n + z * (h - n)
        results.append((h, torch.cat([r, z, n, h_n], -1)))
    hidden, gates = (torch.stack(one[::-1] if reverse else one) for one in zip(*results, strict=True))
    return hidden, gates


@torch.library.custom_op("gradfuse::gru_steps_backward", mutates_args=())
def gru_steps_backward(
    grad_hidden: Tensor, initial_h: Tensor, hidden: Tensor, gates: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What `torch.ops.aclnn.gru_recurrence_backward` computes, of any floating-point type."""
    before = recurrence.before(hidden, initial_h, reverse)
    grad_h, results = torch.zeros_like(initial_h), []
    order = range(len(hidden))
    for t in order if reverse else reversed(order):
        r, z, n, h_n = gates[t].chunk(4, -1)
        grad_h = grad_hidden[t] + grad_h
        grad_n = grad_h * (1 - z) * (1 - n * n)
        both = grad_n * h_n * (r - r * r), grad_h * (before[t] - n) * (z - z * z)
        results.append((torch.cat([*both, grad_n], -1), torch.cat([*both, grad_n * r], -1)))
        grad_h = grad_h * z + results[-1][1] @ weight
    grad_input, grad_recurrent = (torch.stack(one if reverse else one[::-1]) for one in zip(*results, strict=True))
    return grad_input, grad_h, grad_recurrent


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


_TRACED: dict[str, Any] = {
    "LstmRecurrence": lstm_steps,
    "LstmRecurrenceBackward": lstm_steps_backward,
    "GruRecurrence": gru_steps,
    "GruRecurrenceBackward": gru_steps_backward,
}
"""Placeholders for operators of the domain `aclnn` in traced programs, with the same arguments and results."""

_NAMES = {
    torch.ops.gradfuse.lstm_steps.default: "LstmRecurrence",
    torch.ops.gradfuse.lstm_steps_backward.default: "LstmRecurrenceBackward",
    torch.ops.gradfuse.gru_steps.default: "GruRecurrence",
    torch.ops.gradfuse.gru_steps_backward.default: "GruRecurrenceBackward",
}
"""Placeholder, as in nodes of programs -> the name of its operator."""

for _name, _steps in _TRACED.items():
    _steps.register_fake(OPS[_name].torch_op.outputs)
for _name, _gradients in (("LstmRecurrence", lstm_recurrence.gradients), ("GruRecurrence", gru_recurrence.gradients)):
    _TRACED[_name].register_autograd(
        functools.partial(_gradients, _TRACED[f"{_name}Backward"]), setup_context=OPS[_name].torch_op.setup_context
    )


@contextmanager
def scanned() -> Iterator[None]:
    """Let GRU and LSTM layers that are called under it be traced as `gru_steps` and `lstm_steps`.

    `nn.RNN` and projections of the state (`proj_size`) stay as they are. With dropout between their layers, which
    PyTorch would trace as none, or with packed sequences, they are traced step by step here. Under autocast, `nn.RNN`
    and cells are traced as products, of which torch casts the operands. Layers run on padded sequences in the place of
    packed ones.
    """
    with _Scanned():
        yield


@contextmanager
def left_unflattened() -> Iterator[None]:
    """Let `flatten_parameters()` of recurrent layers do nothing: it moves memory for kernels of GPUs alone."""
    original = torch.nn.RNNBase.flatten_parameters
    torch.nn.RNNBase.flatten_parameters = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.RNNBase.flatten_parameters = original  # type: ignore[method-assign]


class _Scanned(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        layer, cell = _LAYERS.get(name), _CELLS.get(name)
        narrow = (layer or cell) is not None and torch.is_autocast_enabled(args[0].device.type)
        if cell is not None and narrow and not kwargs:
            return cell(*args)
        # A packed sequence comes with its batch sizes in the place of the first state.
        pack = pack_of(args[1]) if layer is not None and len(args) == 9 else None
        if pack is not None and layer is not None:
            data, _, first, *settings = args
            if layer is _lstm:
                layer = _projected_lstm if first[0].shape[-1] != first[1].shape[-1] else layer
            states, *last = layer(pack.padded(data), first, *settings, False, pack)
            return pack.packed(states), *last
        if layer is not None and not kwargs and len(args) == 9 and isinstance(args[3], bool):
            first, drops = args[1], args[4] > 1 and args[5] > 0.0 and args[6]
            if layer is _lstm and first[0].shape[-1] != first[1].shape[-1]:
                layer = _projected_lstm
            if layer in (_gru, _lstm) or drops or narrow:
                return layer(*args)
        return func(*args, **(kwargs or {}))


def _gru(x: Tensor, first: Tensor, *settings: Any) -> _Tensors:
    def steps(projected: Tensor, at: int, weight: Tensor, bias: Tensor | None, reverse: bool) -> _Tensors:
        results: _Tensors = torch.ops.gradfuse.gru_steps(
            projected, first[at].to(projected.dtype), weight, bias, reverse
        )
        return results[:1]

    states, (last,) = _stacked(x, steps, *settings)
    return states, last


def _lstm(x: Tensor, first: Sequence[Tensor], *settings: Any) -> _Tensors:
    def steps(projected: Tensor, at: int, weight: Tensor, bias: Tensor | None, reverse: bool) -> _Tensors:
        state, cell = (one[at].to(projected.dtype) for one in first)
        results: _Tensors = torch.ops.gradfuse.lstm_steps(projected, state, cell, weight, bias, reverse)
        return results[:2]

    states, last = _stacked(x, steps, *settings)
    return states, *last


def _projected_lstm(x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], *settings: Any) -> _Tensors:
    def steps(projected: Tensor, at: int, weight: Tensor, bias: Tensor | None, reverse: bool) -> _Tensors:
        # The last of the weights of each layer and direction.
        of_result = weights[len(weights) // len(first[0]) * (at + 1) - 1].to(projected.dtype)

        def cell(step: Tensor, h: Tensor, c: Tensor) -> _Tensors:
            i, f, g, o = (step + torch.nn.functional.linear(h, weight, bias)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.nn.functional.linear(torch.sigmoid(o) * torch.tanh(c), of_result), c

        return _unrolled(cell, projected, [one[at].to(projected.dtype) for one in first], reverse)

    states, last = _stacked(x, steps, weights, *settings)
    return states, *last


def _rnn(nonlinearity: Callable[[Tensor], Tensor], x: Tensor, first: Tensor, *settings: Any) -> _Tensors:
    def steps(projected: Tensor, at: int, weight: Tensor, bias: Tensor | None, reverse: bool) -> _Tensors:
        def cell(step: Tensor, h: Tensor) -> _Tensors:
            return (nonlinearity(step + torch.nn.functional.linear(h, weight, bias)),)

        return _unrolled(cell, projected, [first[at].to(projected.dtype)], reverse)

    states, (last,) = _stacked(x, steps, *settings)
    return states, last


def _unrolled(cell: Callable[..., _Tensors], projected: Tensor, states: Sequence[Tensor], reverse: bool) -> _Tensors:
    """Return the states after each step of a sequence, stacked."""
    results = []
    for step in projected.flip(0) if reverse else projected:
        states = cell(step, *states)
        results.append(states)
    return tuple(torch.stack(one[::-1] if reverse else one) for one in zip(*results, strict=True))


_LAYERS: dict[str, Callable[..., _Tensors]] = {
    "gru": _gru,
    "lstm": _lstm,
    "rnn_tanh": functools.partial(_rnn, torch.tanh),
    "rnn_relu": functools.partial(_rnn, torch.relu),
}


def _rnn_cell(nonlinearity: Callable[[Tensor], Tensor], x: Tensor, h: Tensor, *weights: Any) -> Tensor:
    of_input, of_state = _projections(x, h, *weights)
    return nonlinearity(of_input + of_state)


def _gru_cell(x: Tensor, h: Tensor, *weights: Any) -> Tensor:
    of_input, of_state = (one.chunk(3, -1) for one in _projections(x, h, *weights))
    reset, update = (torch.sigmoid(a + b) for a, b in zip(of_input[:2], of_state[:2], strict=True))
    new = torch.tanh(of_input[2] + reset * of_state[2])
    return (h - new) * update + new


def _lstm_cell(x: Tensor, states: Sequence[Tensor], *weights: Any) -> _Tensors:
    h, c = states
    of_input, of_state = _projections(x, h, *weights)
    i, f, g, o = (of_input + of_state).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _projections(
    x: Tensor, h: Tensor, of_input: Tensor, of_state: Tensor, b: Tensor | None = None, c: Tensor | None = None
) -> _Tensors:
    return torch.nn.functional.linear(x, of_input, b), torch.nn.functional.linear(h, of_state, c)


_CELLS: dict[str, Callable[..., Any]] = {
    "gru_cell": _gru_cell,
    "lstm_cell": _lstm_cell,
    "rnn_tanh_cell": functools.partial(_rnn_cell, torch.tanh),
    "rnn_relu_cell": functools.partial(_rnn_cell, torch.relu),
}


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
    pack: Pack | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run a sequence through all layers; return the result and the last states of each layer and direction, stacked.

    Sequences of a pack end at their own lengths. Results after them are of no meaning.
    """
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    x = x.transpose(0, 1) if batch_first else x
    last: list[_Tensors] = []
    for layer in range(layers):
        if layer and pack is not None and dropout and train:
            x = pack.padded(torch.nn.functional.dropout(pack.packed(x), dropout, train))
        elif layer:
            x = torch.nn.functional.dropout(x, dropout, train)
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            of_input, of_state, *others = weights[each * at : each * (at + 1)]
            input_bias, state_bias = others[:2] if has_biases else (None, None)
            backward = direction == 1
            read = pack.reversed(x) if pack is not None and backward else x
            projected = torch.nn.functional.linear(read, of_input, input_bias)
            # Under autocast the projection is narrower than the weights.
            weight, bias = (None if one is None else one.to(projected.dtype) for one in (of_state, state_bias))
            assert weight is not None
            if pack is None:
                states = steps(projected, at, weight, bias, backward)
                last.append(tuple(one[0 if backward else -1] for one in states))
                outputs.append(states[0])
            else:
                states = steps(projected, at, weight, bias, False)
                last.append(tuple(map(pack.last, states)))
                outputs.append(pack.reversed(states[0]) if backward else states[0])
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    x = x.transpose(0, 1) if batch_first else x
    return x, [torch.stack(one) for one in zip(*last, strict=True)]


def fuse_recurrences(program: ExportedProgram) -> None:
    """Put `aclnn::lstm_recurrence` and the like into a traced program, where their types are those of the kernels."""
    for node in program.graph.nodes:
        if node.target in _NAMES and node.args[0].meta["val"].dtype in _KERNEL_TYPES:
            node.target = getattr(torch.ops.aclnn, OPS[_NAMES[node.target]].stem).default
    program.graph_module.recompile()


_KERNEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the functions that emit the operators' nodes, by overload, for `custom_translation_table`."""
    return {overload: _body_caller(name) for overload, name in _NAMES.items()}


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
