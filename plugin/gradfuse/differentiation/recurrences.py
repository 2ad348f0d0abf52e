"""LSTM, GRU and RNN as Scans of standard operators, or as recurrences of the domain `aclnn`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from gradfuse.differentiation.expansion import expansion
from gradfuse.differentiation.rules import FUSES, Call
from gradfuse.differentiation.tensors import Tape, Tensor

Tensors: TypeAlias = "Sequence[Tensor]"
Step: TypeAlias = "Callable[[Tape, Tensors, Tensor], list[Tensor]]"
"""Writes one step: from the states before it and the projected input to the states behind it."""

_KERNEL_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_LAST = 2**63 - 1
_ACTIVATIONS = ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")
_LIMITS = f"no clip; activations {', '.join(_ACTIVATIONS)}"


@expansion("RNN", limits=_LIMITS)
def rnn(call: Call) -> list[Tensor | None]:
    """h' = f(x W + b + h R + c)."""

    def step_of(weight: Tensor, bias: Tensor | None, _: Tensor | None, activations: list[str]) -> Step:
        def step(tape: Tape, states: Tensors, now: Tensor) -> list[Tensor]:
            total = now + _product(tape, states[0], weight, bias)
            return [total.op(activations[0])]

        return step

    return _recurrent(call, step_of, 1, 1, ["Tanh"])


@expansion("GRU", limits=_LIMITS)
def gru(call: Call) -> list[Tensor | None]:
    """The gates are update, reset and the new value; h' = (1 - z) n + z h."""
    before_reset = call.attribute("linear_before_reset", 0)

    def step_of(weight: Tensor, bias: Tensor | None, _: Tensor | None, activations: list[str]) -> Step:
        outer = weight.tape
        parts = _parts(outer, weight, 3)
        gates = outer.concat(parts[:2], axis=1)
        biases = [None] * 3 if bias is None else list(_parts(outer, bias, 3))
        of_gates = None if biases[0] is None or biases[1] is None else outer.concat([biases[0], biases[1]])

        def step(tape: Tape, states: Tensors, now: Tensor) -> list[Tensor]:
            (h,) = states
            update_x, reset_x, new_x = _parts(tape, now, 3)
            update_h, reset_h = _parts(tape, _product(tape, h, gates, of_gates), 2)
            update = (update_x + update_h).op(activations[0])
            reset = (reset_x + reset_h).op(activations[0])
            if before_reset:
                inner = reset * _product(tape, h, parts[2], biases[2])
            else:
                inner = _product(tape, reset * h, parts[2], biases[2])
            new = (new_x + inner).op(activations[1])
            return [new + update * (h - new)]

        return step

    fused = _Fused("GruRecurrence", (1, 0, 2), 2) if before_reset else None
    return _recurrent(call, step_of, 3, 1, ["Sigmoid", "Tanh"], fused)


@expansion("LSTM", limits=_LIMITS)
def lstm(call: Call) -> list[Tensor | None]:
    """The gates are input, output, forget and the new value; c' = f c + i n, h' = o h(c'). Peepholes look at c."""
    coupled = call.attribute("input_forget", 0)

    def step_of(weight: Tensor, bias: Tensor | None, peepholes: Tensor | None, activations: list[str]) -> Step:
        first, second, third = activations
        looks = [None] * 3 if peepholes is None else list(_parts(weight.tape, peepholes, 3))

        def looked(tape: Tape, gate: Tensor, k: int, cell: Tensor) -> Tensor:
            look = looks[k]
            return gate if look is None else gate + tape.of(look.value) * cell

        def step(tape: Tape, states: Tensors, now: Tensor) -> list[Tensor]:
            h, cell = states
            enter, leave, forget, new = _parts(tape, now + _product(tape, h, weight, bias), 4)
            enter = looked(tape, enter, 0, cell).op(first)
            forget = 1 - enter if coupled else looked(tape, forget, 2, cell).op(first)
            after = forget * cell + enter * new.op(second)
            return [looked(tape, leave, 1, after).op(first) * after.op(third), after]

        return step

    fused = None if coupled else _Fused("LstmRecurrence", (0, 2, 3, 1), 3)
    return _recurrent(call, step_of, 4, 2, ["Sigmoid", "Tanh", "Tanh"], fused)


@dataclasses.dataclass(frozen=True)
class _Fused:
    """A recurrence of the domain `aclnn`: its name, the place of each of its gates in ONNX, how much it gives."""

    name: str
    order: tuple[int, ...]
    outputs: int

    def ordered(self, tensor: Tensor) -> Tensor:
        """Return weights or biases of all gates, of one direction, in the order of the recurrence."""
        parts = _parts(tensor.tape, tensor, len(self.order), 0)
        return tensor.tape.concat([parts[k] for k in self.order])


def _recurrent(
    call: Call,
    step_of: Callable[[Tensor, Tensor | None, Tensor | None, list[str]], Step],
    gates: int,
    count: int,
    default: list[str],
    fused: _Fused | None = None,
) -> list[Tensor | None]:
    """Write a recurrent operator of `count` states, with the function that gives a direction's step.

    It is called with the weight (H, gates H), the bias (gates H), the peepholes and the activations of the direction.
    `fused` stands for the steps where nothing but the default is asked for.
    """
    tape = call.tape
    x, weights, recurrent = (_given(call, k) for k in range(3))
    direction, layout = call.attribute("direction", "forward"), call.attribute("layout", 0)
    reversed_ = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    activations = _activations(call, default, len(reversed_))
    lengths = call.input(4)
    initial = [call.input(5 + k) for k in range(count)]
    if layout:
        x = x.transpose([1, 0, 2])
        initial = [None if one is None else one.transpose([1, 0, 2]) for one in initial]
    none = [None] * len(reversed_)
    biases = call.input(3)
    halves = [none, none] if biases is None else [_each(half, len(reversed_)) for half in _parts(tape, biases, 2)]
    peepholes = call.input(7)
    looks = none if peepholes is None else _each(peepholes, len(reversed_))
    starts = [none if one is None else _each(one, len(reversed_)) for one in initial]
    empty = tape.op(
        "ConstantOfShape",
        tape.concat([x.size(1), recurrent.size(-1)]),
        dtype=x.dtype,
        value=ir.tensor([0.0], dtype=x.dtype),
    )
    # onnxruntime gives zeros as the last states of a sequence without steps, whatever they are initially.
    stepped = None if lengths is None else (lengths.cast(ir.DataType.INT64) > 0).unsqueeze(1)
    ordinary = all(one == default for one in activations) and lengths is None and peepholes is None
    if not (call.node.meta.get(FUSES) and ordinary and x.dtype in _KERNEL_TYPES):
        fused = None
    sequences, last = [], []
    for k, (weight, of_state) in enumerate(
        zip(_each(weights, len(reversed_)), _each(recurrent, len(reversed_)), strict=True)
    ):
        first = [empty if (start := one[k]) is None else start for one in starts]
        if stepped is not None:
            first = [one if one is empty else one.masked(stepped) for one in first]
        of_input, bias = halves[0][k], halves[1][k]
        if fused is not None:
            weight, of_state = fused.ordered(weight), fused.ordered(of_state)
            of_input, bias = (None if one is None else fused.ordered(one) for one in (of_input, bias))
        projected = x.matmul(weight.transpose([1, 0]))
        projected = projected if of_input is None else projected + of_input
        if fused is not None:
            states, final = _by_operator(tape, fused, [projected, *first, of_state, bias], count, reversed_[k])
        else:
            step = step_of(of_state.transpose([1, 0]), bias, looks[k], activations[k])
            states, final = _scanned(tape, step, first, projected, lengths, reversed_[k])
        sequences.append(states.unsqueeze(1))
        last.append([one.unsqueeze(0) for one in final])
    y = tape.concat(sequences, axis=1)
    ends = [tape.concat(one, axis=0) for one in zip(*last, strict=True)]
    if layout:
        y, ends = y.transpose([2, 0, 1, 3]), [one.transpose([1, 0, 2]) for one in ends]
    return [y, *ends]


def _by_operator(
    tape: Tape, fused: _Fused, inputs: list[Tensor | None], count: int, backward: bool
) -> tuple[Tensor, list[Tensor]]:
    """Write the recurrence of one direction; return what `_scanned` does."""
    results = tape.parts(fused.name, fused.outputs, *inputs, domain="aclnn", reverse=int(backward))
    begin, end = (0, 1) if backward else (-1, _LAST)
    ends = []
    for first, states in zip(inputs[1:], results[:count], strict=False):
        assert first is not None
        # Of a sequence without steps the initial state is the last one.
        found = [states.slice(tape.ints(begin), tape.ints(end), tape.ints(0)), first.unsqueeze(0)]
        joined = tape.concat(found if backward else found[::-1])
        ends.append(joined.slice(tape.ints(begin), tape.ints(end), tape.ints(0)).squeeze(0))
    return results[0], ends


def _scanned(
    tape: Tape, step: Step, first: Tensors, projected: Tensor, lengths: Tensor | None, backward: bool
) -> tuple[Tensor, list[Tensor]]:
    """Write the Scan of one direction; return the states of all steps, and those behind the last one.

    Behind the end of a sequence its states stay as they are, and its output is 0.
    """
    name = f"{tape.prefix}Scan_{len(tape.nodes)}"
    inner = Tape(f"{name}/", tape.opset)
    types = [ir.TensorType(one.dtype) for one in first]
    before = [ir.Value(name=f"{name}/before_{k}", type=kind) for k, kind in enumerate(types)]
    now = ir.Value(name=f"{name}/now", type=ir.TensorType(projected.dtype))
    given, slices = [projected], [now]
    states = [inner.of(value) for value in before]
    after = step(inner, states, inner.of(now))
    output = after[0]
    if lengths is not None:
        zero, one = tape.constant(0), tape.constant(1)
        given.append(tape.op("Range", zero, projected.size(0).squeeze(0), one))
        slices.append(ir.Value(name=f"{name}/turn", type=ir.TensorType(ir.DataType.INT64)))
        turn = inner.of(slices[1])
        within = (turn < inner.of(lengths.cast(ir.DataType.INT64).value)).unsqueeze(1)
        output = output.masked(within)
        after = [within.where(new, old) for new, old in zip(after, states, strict=True)]
    results = [one.op("Identity") for one in (*after, output)]
    body = ir.Graph([*before, *slices], [one.value for one in results], nodes=inner.nodes, name=name)
    outputs = [ir.Value(name=f"{name}.{k}", type=kind) for k, kind in enumerate([*types, types[0]])]
    direction = int(backward)
    tape.nodes.append(
        ir.node(
            "Scan",
            [one.value for one in (*first, *given)],
            {
                "body": body,
                "num_scan_inputs": len(given),
                "scan_input_directions": [direction] * len(given),
                "scan_output_directions": [direction],
            },
            name=name,
            outputs=outputs,
        )
    )
    *final, sequence = [tape.of(value) for value in outputs]
    return sequence, final


def _activations(call: Call, default: list[str], directions: int) -> list[list[str]]:
    """Return the activations of each direction."""
    if call.attribute("clip") is not None:
        raise call.error("it has a clip; expected none")
    names = call.attribute("activations") or default * directions
    known = {name.lower(): name for name in _ACTIVATIONS}
    for name in names:
        if name.lower() not in known:
            raise call.error(f"an activation is {name!r}; expected one of {', '.join(_ACTIVATIONS)}")
    found = [known[name.lower()] for name in names]
    return [found[k * len(default) : (k + 1) * len(default)] for k in range(directions)]


def _product(tape: Tape, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """state weight + bias, where the last two are of the graph around."""
    product = state.matmul(tape.of(weight.value))
    return product if bias is None else product + tape.of(bias.value)


def _each(tensor: Tensor, count: int) -> list[Tensor]:
    """Return the tensor's slices along its first axis."""
    if count == 1:
        return [tensor.squeeze(0)]
    return [part.squeeze(0) for part in _parts(tensor.tape, tensor, count, 0)]


def _parts(tape: Tape, tensor: Tensor, count: int, axis: int = -1) -> tuple[Tensor, ...]:
    """Split a tensor into parts of equal size."""
    number = count if tape.opset >= 18 else None
    return tape.parts("Split", count, tensor, axis=axis, num_outputs=number)


def _given(call: Call, index: int) -> Tensor:
    found = call.input(index)
    assert found is not None
    return found
