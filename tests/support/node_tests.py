"""onnx's own node tests as tests of gradient rules, by central differences in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from differences import Differences, directions
from onnx.backend.test.loader import load_model_tests
from onnx.reference import ReferenceEvaluator

from gradfuse import ArgumentError, differentiate
from gradfuse.differentiation.rules import table

Array = npt.NDArray[Any]

_FIXED = {"Upsample": [1]}
"""Float inputs without a gradient of operators that become others, which have a rule."""

_IN_FLOAT32 = ("AffineGrid", "Loop", "MeanVarianceNormalization", "MelWeightMatrix")
"""Operators whose bodies have constants in float32."""

_NEWEST_RUN = 26
"""The newest opset that onnxruntime runs: operators that are new in later ones it does not know anyway."""

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


@dataclasses.dataclass(frozen=True)
class Case:
    """A node test with float inputs and float outputs.

    Attributes:
        model: the model of one node.
        feeds: its inputs.
        expected: its outputs.
    """

    model: onnx.ModelProto
    feeds: Mapping[str, Array]
    expected: Mapping[str, Array]

    @property
    def op_type(self) -> str:
        return str(self.model.graph.node[0].op_type)

    @property
    def wrt(self) -> list[str]:
        """The float inputs."""
        return floats(self.model.graph.input)

    @property
    def fixed(self) -> set[str]:
        """The float inputs that have no gradient, although the outputs depend on them."""
        entry, node = table().get(("", self.op_type)), self.model.graph.node[0]
        places = entry.fixed if entry else _FIXED.get(self.op_type, ())
        return {node.input[k] for k in places if k < len(node.input)}

    def moved(self) -> Case:
        """The case with all float inputs a little larger, each element by another amount: away from kinks."""
        rng = np.random.default_rng(1)
        moved = {
            name: (
                np.nan_to_num(array, nan=1.5, posinf=2.5, neginf=-2.5) + rng.uniform(0.05, 0.15, array.shape)
            ).astype(array.dtype)
            for name, array in self.feeds.items()
            if name in self.wrt
        }
        return dataclasses.replace(self, feeds={**self.feeds, **moved}, expected={})


@functools.cache
def cases() -> dict[str, Case]:
    """Name -> test, of all tests of one node with a float input and a float output, all of them tensors.

    Tests whose name ends with `_expanded` are left out: they are others with a function's body in the node's place.
    """
    found = {}
    for test in load_model_tests(kind="node"):
        model = test.model
        if model is None or not test.data_sets or test.name.endswith("_expanded") or len(model.graph.node) != 1:
            continue
        values = [*model.graph.input, *model.graph.output]
        if not all(value.type.HasField("tensor_type") for value in values):
            continue
        if model.graph.node[0].domain in ("", "ai.onnx") and floats(model.graph.input) and floats(model.graph.output):
            inputs, outputs = test.data_sets[0]
            found[test.name] = Case(model, _named(model.graph.input, inputs), _named(model.graph.output, outputs))
    return found


def _named(values: Any, arrays: Any) -> dict[str, Array]:
    read = [onnx.numpy_helper.to_array(a) if isinstance(a, onnx.TensorProto) else np.asarray(a) for a in arrays]
    return dict(zip((value.name for value in values), read, strict=True))


def floats(values: Any) -> list[str]:
    """Return the names of float tensors."""
    return [value.name for value in values if value.type.tensor_type.elem_type in _FLOATS]


def run(model: onnx.ModelProto, feeds: Mapping[str, Array], *, by_onnx: bool) -> dict[str, Array]:
    """Run a model in onnxruntime, or with onnx's own evaluator."""
    names = [output.name for output in model.graph.output]
    if by_onnx:
        return dict(zip(names, ReferenceEvaluator(model).run(None, dict(feeds)), strict=True))
    if model.opset_import[0].version > _NEWEST_RUN:
        older = onnx.ModelProto()
        older.CopyFrom(model)
        older.opset_import[0].version = _NEWEST_RUN
        model = older
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def _run_anyhow(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> tuple[dict[str, Array], bool]:
    """Run a model in onnxruntime, or with onnx's evaluator where that has not implemented the operators: and which."""
    try:
        return run(model, feeds, by_onnx=False), False
    except Exception:  # what it raises for what it has not implemented has no common base
        return run(_for_evaluator(model), feeds, by_onnx=True), True


def _for_evaluator(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with ScatterElements, which is the same, in the place of Scatter, which onnx's evaluator lacks."""
    if model.graph.node[0].op_type != "Scatter" or len(model.graph.node) > 1:
        return model
    newer = onnx.ModelProto()
    newer.CopyFrom(model)
    newer.graph.node[0].op_type, newer.opset_import[0].version = "ScatterElements", 11
    return newer


Derived = Callable[[Case, Mapping[str, Array], bool], "tuple[dict[str, Array], list[str]]"]
"""Computes a vector-Jacobian product of a case, given seeds and whether onnx's evaluator runs the model.

It returns the gradients by input, and the inputs that the outputs do not depend on in a differentiable way.
"""


def by_gradfuse(case: Case, seeds: Mapping[str, Array], by_onnx: bool) -> tuple[dict[str, Array], list[str]]:
    """What `gradfuse.differentiate` writes, run."""
    wrt, without = case.wrt, []
    gradients = None
    while wrt and gradients is None:
        try:
            gradients = differentiate(case.model, wrt, seeds={output: f"seed_{output}" for output in seeds})
        except ArgumentError as error:
            without.append(next(name for name in wrt if f"does not depend on {name!r}" in str(error)))
            wrt.remove(without[-1])
    if gradients is None:
        return {}, without
    # Gradients of what onnxruntime runs have to run there too; of others they may.
    fed = {**case.feeds, **{f"seed_{output}": seed for output, seed in seeds.items()}}
    found = _run_anyhow(gradients, fed)[0] if by_onnx else run(gradients, fed, by_onnx=False)
    return {name: found[f"{name}.grad"] for name in wrt}, without


def compare(case: Case, derived: Derived = by_gradfuse) -> list[str]:
    """Compare the gradients of a case with differences, along random directions.

    Returns:
        The float inputs that have a gradient; none where the outputs do not depend on any in a differentiable way.

    Raises:
        ModelError: the operator has no rule, or its rule does not take this use of it.
        AssertionError: a gradient is not that of the differences, or an input without one has one by the differences.
    """
    rng = np.random.default_rng(0)
    outputs, by_onnx = _run_anyhow(case.model, case.feeds)
    seeds = {o: rng.standard_normal(outputs[o].shape) for o in floats(case.model.graph.output)}
    typed = {output: seed.astype(outputs[output].dtype) for output, seed in seeds.items()}
    found, without = derived(case, typed, by_onnx)
    for name, expected in case.expected.items():
        # Elements of a transform are sums of all others.
        largest = float(np.abs(expected[np.isfinite(expected)]).max(initial=0)) if expected.dtype.kind == "f" else 0.0
        same = np.allclose(outputs[name], expected, rtol=1e-3, atol=1e-5 + 1e-6 * largest, equal_nan=True)
        assert same, f"{name}: onnxruntime gives other values than the test"
    differences = Differences(_for_evaluator(case.model), seeds, wide=case.op_type not in _IN_FLOAT32)
    for name in case.wrt:
        if name in without and name in case.fixed:
            continue
        actual = np.zeros_like(case.feeds[name]) if name in without else found[name]
        assert actual.shape == case.feeds[name].shape and actual.dtype == case.feeds[name].dtype
        if not actual.size:
            continue
        for direction in directions(actual.shape, 2, rng):
            wanted = differences.along(case.feeds, name, direction)
            scale = max(float(np.abs(actual).max()), abs(wanted), 1e-2)
            difference = abs(float((actual * direction).sum()) - wanted)
            assert difference <= 1e-4 * scale * np.sqrt(actual.size), f"{name}: {wanted} by differences"
    return list(found)
