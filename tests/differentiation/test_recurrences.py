"""Gradients of LSTM, GRU and RNN against torch.autograd in float64, with every option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from autograd import numbers, require_torchs
from torch import Tensor

from gradfuse import ModelError, TrainingSession, build_training_step, differentiate
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

T, N, INPUT, HIDDEN = 4, 3, 2, 3
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STATES = {"RNN": 1, "GRU": 1, "LSTM": 2}
DIRECTIONS = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}


def recurrent(op: str, given: list[str], shapes: dict[str, tuple[int, ...]], **attributes: Any) -> onnx.ModelProto:
    """A model whose output is everything that the operator gives, flattened and joined."""
    names = ["x", "w", "r", "b", "lengths", "h", "c", "p"][: 8 if op == "LSTM" else 6]
    inputs = [name if name in given else "" for name in names]
    while not inputs[-1]:
        inputs.pop()
    results = ["all", "last", "cell"][: 1 + STATES[op]]
    nodes = [onnx.helper.make_node(op, inputs, results, hidden_size=HIDDEN, **attributes)]
    nodes += [onnx.helper.make_node("Reshape", [name, "minus"], [f"{name}_flat"]) for name in results]
    nodes.append(onnx.helper.make_node("Concat", [f"{name}_flat" for name in results], ["y"], axis=0))
    types = {"lengths": onnx.TensorProto.INT32}
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [
            onnx.helper.make_tensor_value_info(name, types.get(name, onnx.TensorProto.FLOAT), shapes[name])
            for name in given
        ],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None])],
        [onnx.numpy_helper.from_array(np.array([-1]), "minus")],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


def by_formula(
    op: str, direction: str, activations: Sequence[Callable[[Tensor], Tensor]], options: dict[str, Any]
) -> Any:
    """The operator's formulas in ONNX's specification, with loops."""

    def step(k: int, now: Tensor, h: Tensor, c: Tensor, p: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        f, *others = activations[k * (len(activations) // 2) :] if direction == "bidirectional" else activations
        weight, bias = p["r"], p["b"]
        assert weight is not None
        rw = weight[k].chunk(GATES[op])
        zero = torch.zeros(HIDDEN, dtype=now.dtype)
        wb, rb = ([zero] * GATES[op],) * 2 if bias is None else (half.chunk(GATES[op]) for half in bias[k].chunk(2))
        inputs = [part + one for part, one in zip(now.chunk(GATES[op], -1), wb, strict=True)]
        sums = [part + h @ one.T + two for part, one, two in zip(inputs, rw, rb, strict=True)]
        if op == "RNN":
            return f(sums[0]), c
        if op == "GRU":
            update, reset = f(sums[0]), f(sums[1])
            if options.get("linear_before_reset"):
                new = others[0](inputs[2] + reset * (h @ rw[2].T + rb[2]))
            else:
                new = others[0](inputs[2] + (reset * h) @ rw[2].T + rb[2])
            return (1 - update) * new + update * h, c
        peepholes = p.get("p")
        look = [zero] * 3 if peepholes is None else peepholes[k].chunk(3)
        enter = f(sums[0] + look[0] * c)
        forget = 1 - enter if options.get("input_forget") else f(sums[2] + look[2] * c)
        cell = forget * c + enter * others[0](sums[3])
        return f(sums[1] + look[1] * cell) * others[1](cell), cell

    def by_torch(x: Tensor, w: Tensor, **p: Any) -> Tensor:
        turns, batch = x.shape[:2]
        lengths = p.get("lengths")
        limits = [turns] * batch if lengths is None else [int(n) for n in lengths]
        everything, ends, cells = [], [], []
        parameters = {"b": None, **p}
        for k, backward in enumerate(DIRECTIONS[direction]):
            outputs = []
            for n in range(batch):
                h, c = (
                    torch.zeros(1, HIDDEN, dtype=x.dtype) if p.get(name) is None else p[name][k, n : n + 1]
                    for name in ("h", "c")
                )
                if not limits[n]:
                    h, c = torch.zeros_like(h), torch.zeros_like(c)  # As onnxruntime has it.
                rows = [torch.zeros(1, HIDDEN, dtype=x.dtype)] * turns
                order = range(limits[n])
                for t in reversed(order) if backward else order:
                    h, c = step(k, x[t, n : n + 1] @ w[k].T, h, c, parameters)
                    rows[t] = h
                outputs.append(torch.stack(rows))
                ends.append(h)
                cells.append(c)
            everything.append(torch.cat(outputs, 1))
        found = [torch.stack(everything, 1), torch.cat(ends), *([torch.cat(cells)] if op == "LSTM" else [])]
        return torch.cat([one.flatten() for one in found])

    return by_torch


def shapes_of(op: str, directions: int) -> dict[str, tuple[int, ...]]:
    gates = GATES[op] * HIDDEN
    return {
        "x": (T, N, INPUT),
        "w": (directions, gates, INPUT),
        "r": (directions, gates, HIDDEN),
        "b": (directions, 2 * gates),
        "lengths": (N,),
        "h": (directions, N, HIDDEN),
        "c": (directions, N, HIDDEN),
        "p": (directions, 3 * HIDDEN),
    }


CASES: list[tuple[str, str, list[str], dict[str, Any]]] = [
    ("RNN", "forward", [], {}),
    ("RNN", "bidirectional", ["b", "h", "lengths"], {"activations": ["Relu", "Softsign"]}),
    ("GRU", "forward", ["b"], {"linear_before_reset": 1}),
    ("GRU", "reverse", [], {}),
    ("GRU", "bidirectional", ["b", "lengths", "h"], {}),
    ("GRU", "bidirectional", ["b", "lengths"], {"linear_before_reset": 1}),
    ("LSTM", "forward", [], {}),
    ("LSTM", "reverse", ["b", "lengths", "h", "c"], {}),
    ("LSTM", "bidirectional", ["b", "h", "p"], {}),
    ("LSTM", "forward", ["b", "c", "p", "lengths"], {"activations": ["Sigmoid", "Softsign", "Relu"]}),
    ("LSTM", "forward", ["b"], {"input_forget": 1}),
]
FUNCTIONS = {
    "Relu": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Softsign": torch.nn.functional.softsign,
    "Tanh": torch.tanh,
}
DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


@pytest.mark.parametrize("op, direction, optional, options", CASES)
def test_recurrences_of_all_options(op: str, direction: str, optional: list[str], options: dict[str, Any]) -> None:
    directions = len(DIRECTIONS[direction])
    shapes = shapes_of(op, directions)
    given = [name for name in shapes if name in ("x", "w", "r") or name in optional]
    model = recurrent(op, given, shapes, direction=direction, **options)
    feeds: dict[str, Any] = {name: numbers(*shapes[name], seed=k) for k, name in enumerate(given)}
    if "lengths" in given:
        feeds["lengths"] = np.array([4, 1, 3], np.int32)
    activations = [FUNCTIONS[name] for name in options.get("activations", DEFAULT[op] * directions)]
    wrt = [name for name in given if name != "lengths"]
    require_torchs(model, feeds, by_formula(op, direction, activations, options), wrt)


@pytest.mark.parametrize("op, direction", [("RNN", "reverse"), ("GRU", "bidirectional"), ("LSTM", "forward")])
def test_a_sequence_without_steps_ends_in_zeros(op: str, direction: str) -> None:
    """In onnxruntime; its initial states have no part in anything."""
    directions = len(DIRECTIONS[direction])
    shapes = shapes_of(op, directions)
    given = ["x", "w", "r", "lengths", "h", *(["c"] if op == "LSTM" else [])]
    feeds: dict[str, Any] = {name: numbers(*shapes[name], seed=k) for k, name in enumerate(given)}
    feeds["lengths"] = np.array([2, 0, 4], np.int32)
    formula = by_formula(op, direction, [FUNCTIONS[name] for name in DEFAULT[op] * directions], {})
    model = recurrent(op, given, shapes, direction=direction)
    require_torchs(model, feeds, formula, [name for name in given if name != "lengths"])


def test_a_dynamic_batch_of_any_length_and_outputs_that_are_left_out() -> None:
    """Only the last state is used, which has no name of its own in `all`."""
    shapes: dict[str, Any] = {**shapes_of("GRU", 1), "x": ("turns", "batch", INPUT)}
    model = recurrent("GRU", ["x", "w", "r"], shapes)
    del model.graph.node[1:]
    model.graph.node[0].output[:] = ["", "y"]
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, None, HIDDEN]))
    feeds = {name: numbers(*shapes_of("GRU", 1)[name], seed=k) for k, name in enumerate(["x", "w", "r"])}
    formula = by_formula("GRU", "forward", [torch.sigmoid, torch.tanh], {})
    require_torchs(
        model, feeds, lambda x, w, r: formula(x, w, r=r)[-N * HIDDEN :].reshape(1, N, HIDDEN), ["x", "w", "r"]
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip": 1.0}, r"GRU .*has a clip"),
        ({"activations": ["HardSigmoid", "Tanh"]}, r"GRU .*an activation is 'HardSigmoid'; expected one of Relu, "),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    model = recurrent("GRU", ["x", "w", "r"], shapes_of("GRU", 1), **options)
    with pytest.raises(ModelError, match=message) as error:
        differentiate(model, ["x"], seeds={"y": "v"})
    assert "\n" not in str(error.value)


def test_a_recurrence_that_no_gradient_goes_through_stays() -> None:
    model = recurrent("GRU", ["x", "w", "r"], shapes_of("GRU", 1))
    model.graph.input.append(onnx.helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, [1]))
    model.graph.node[-1].output[0] = "flat"
    model.graph.node.append(onnx.helper.make_node("Mul", ["flat", "s"], ["y"]))
    found = differentiate(model, ["s"], seeds={"y": "v"})
    assert [node.op_type for node in found.graph.node].count("GRU") == 1


FUSED: list[tuple[str, str, list[str], dict[str, Any]]] = [
    ("LSTM", "forward", ["b"], {}),
    ("LSTM", "reverse", ["h"], {"activations": ["Sigmoid", "Tanh", "Tanh"]}),
    ("LSTM", "bidirectional", ["b", "h", "c"], {}),
    ("GRU", "forward", [], {"linear_before_reset": 1}),
    ("GRU", "reverse", ["b"], {"linear_before_reset": 1}),
    ("GRU", "bidirectional", ["b", "h"], {"linear_before_reset": 1}),
]
NOT_FUSED: list[tuple[str, str, list[str], dict[str, Any]]] = [
    ("GRU", "forward", ["b"], {}),
    ("GRU", "forward", ["b", "lengths"], {"linear_before_reset": 1}),
    ("GRU", "forward", [], {"linear_before_reset": 1, "activations": ["Sigmoid", "Relu"]}),
    ("LSTM", "forward", ["b", "p"], {}),
    ("LSTM", "reverse", [], {"input_forget": 1}),
    ("LSTM", "bidirectional", ["b"], {"activations": [*DEFAULT["LSTM"], "Sigmoid", "Softsign", "Tanh"]}),
]


@pytest.mark.parametrize("op, direction, optional, options", [*FUSED, *NOT_FUSED])
@pytest.mark.sampled(every=3)
def test_training_steps_have_the_operator_where_it_is_the_same(
    op: str, direction: str, optional: list[str], options: dict[str, Any]
) -> None:
    directions = len(DIRECTIONS[direction])
    shapes = shapes_of(op, directions)
    given = [name for name in shapes if name in ("x", "w", "r") or name in optional]
    model = recurrent(op, given, shapes, direction=direction, **options)
    values = {name: numbers(*shapes[name], seed=k) for k, name in enumerate(given) if name != "lengths"}
    trained = [name for name in values if name != "x"]
    fixed = [onnx.numpy_helper.from_array(np.array([4, 1, 3], np.int32), "lengths")] * ("lengths" in given)
    inputs = [value for value in model.graph.input if value.name == "x"]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend([*fixed, *(onnx.numpy_helper.from_array(values[n], n) for n in trained)])
    activations = [FUNCTIONS[name] for name in options.get("activations", DEFAULT[op] * directions)]
    formula = by_formula(op, direction, activations, options)

    def gradients(dtype: torch.dtype) -> dict[str, Any]:
        tensors = {n: torch.from_numpy(value).to(dtype).requires_grad_(n != "x") for n, value in values.items()}
        lengths = {"lengths": [4, 1, 3]} if fixed else {}
        formula(**tensors, **lengths).square().mean().backward()
        return {name: tensors[name].grad for name in trained}

    step = build_training_step(model, "mse")
    steps = {"LSTM": "LstmRecurrence", "GRU": "GruRecurrence"}[op]
    found = [node.op_type for node in step.model.graph.node if node.domain == "aclnn" and "Recurrence" in node.op_type]
    fused = (op, direction, optional, options) in FUSED
    assert sorted(found) == sorted([steps, f"{steps}Backward"] * directions * fused)
    session = TrainingSession(step)
    target = np.zeros(T * directions * N * HIDDEN + STATES[op] * directions * N * HIDDEN, np.float32)
    session.step(values["x"], target)
    native, exact = gradients(torch.float32), gradients(torch.float64)
    # Each hidden value is rounded, and takes part in all gradients.
    largest = max(float(one.abs().max()) for one in exact.values())
    for name in trained:
        gradient = np.asarray(session.gradients[name])
        assert_gradients_close(gradient, native[name], exact[name], np.float32, terms=largest)


def test_a_training_step_without_fusing_has_standard_operators_only() -> None:
    model = recurrent("LSTM", ["x", "w", "r"], shapes_of("LSTM", 1))
    weights = [model.graph.input[k] for k in (1, 2)]
    for k, value in enumerate(weights):
        array = numbers(*shapes_of("LSTM", 1)[value.name], seed=k)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        model.graph.input.remove(value)
    step = build_training_step(model, "mse", fuse=False)
    assert not any(node.domain for node in step.model.graph.node)
