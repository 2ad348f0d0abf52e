"""Gradient rules against onnx's own node tests: derivatives along random directions, by differences in float64."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from differences import Differences, directions
from onnx.backend.test.loader import load_model_tests

from gradfuse import ArgumentError, ModelError, differentiate

Array = npt.NDArray[Any]

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)

NO_RULE = {
    *("CausalConvWithState", "Col2Im", "CumProd", "DFT", "DeformConv", "FlexAttention", "GRU", "GridSample"),
    *("If", "LSTM", "LinearAttention", "Loop", "MaxRoiPool", "MaxUnpool", "RNN", "RoiAlign", "STFT", "Scan"),
    *("SequenceMap", "TensorScatter", "SplitToSequence", "Optional", "OptionalGetElement", "Momentum", "Adagrad"),
    *("Adam", "Gradient", "Det"),
}
"""Operators that have a derivative and no rule yet."""

RANDOM = {"Bernoulli", "Dropout", "RandomNormalLike", "RandomUniformLike", "Multinomial"}
"""onnx's evaluator draws other numbers."""

OTHER = {
    "test_acosh_example": "it is at the end of the domain, where the derivative is infinite",
    "test_clip_min_greater_than_max": "it is at a kink",
    "test_elu_example": "it is at a kink",
    "test_celu": "it is at a kink",
}


@functools.cache
def _cases() -> dict[str, Any]:
    found = {}
    for case in load_model_tests(kind="node"):
        model = case.model
        if model is None or not case.data_sets or case.name.endswith("_expanded") or len(model.graph.node) != 1:
            continue
        values = [*model.graph.input, *model.graph.output]
        if not all(value.type.HasField("tensor_type") for value in values):
            continue
        if model.graph.node[0].domain not in ("", "ai.onnx") or model.graph.node[0].op_type in RANDOM:
            continue
        if _floats(model.graph.input) and _floats(model.graph.output) and case.name not in OTHER:
            found[case.name] = case
    return found


def _floats(values: Any) -> list[str]:
    return [value.name for value in values if value.type.tensor_type.elem_type in FLOATS]


def _names() -> list[Any]:
    """All cases, of which the first three of each operator are in the suite."""
    seen: Counter[str] = Counter()
    names = []
    for name, case in _cases().items():
        op_type = case.model.graph.node[0].op_type
        seen[op_type] += 1
        names.append(pytest.param(name, marks=[] if seen[op_type] <= 3 else pytest.mark.slow))
    return names


def _run(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("name", _names())
def test_gradients_are_those_of_differences(name: str) -> None:
    case = _cases()[name]
    model, op_type = case.model, case.model.graph.node[0].op_type
    feeds = {i.name: np.asarray(a) for i, a in zip(model.graph.input, case.data_sets[0][0], strict=False)}
    try:
        outputs = _run(model, feeds)
    except Exception as error:
        pytest.skip(f"onnxruntime does not run it: {str(error)[:80]}")
    rng = np.random.default_rng(0)
    seeds = {o: rng.standard_normal(outputs[o].shape) for o in _floats(model.graph.output)}
    wrt = _floats(model.graph.input)
    gradient = None
    while wrt and gradient is None:
        try:
            gradient = differentiate(model, wrt, seeds={output: f"seed_{output}" for output in seeds})
        except ArgumentError as error:
            # Such as a size that is given as a float.
            wrt.remove(next(n for n in wrt if f"does not depend on {n!r}" in str(error)))
        except ModelError as error:
            if op_type not in NO_RULE:
                assert "; expected" in str(error)  # a use of the operator that its rule refuses by name
            return
    assert op_type not in NO_RULE or not wrt
    if gradient is None:
        return
    named = {f"seed_{output}": seed.astype(outputs[output].dtype) for output, seed in seeds.items()}
    found = _run(gradient, feeds | named)
    differences = Differences(model, seeds)
    for name in wrt:
        actual = found[f"{name}.grad"]
        assert actual.shape == feeds[name].shape and actual.dtype == feeds[name].dtype
        if not actual.size:
            continue
        for direction in directions(actual.shape, 2, rng):
            wanted = differences.along(feeds, name, direction)
            scale = max(float(np.abs(actual).max()), abs(wanted), 1e-2)
            assert abs(float((actual * direction).sum()) - wanted) <= 1e-4 * scale * np.sqrt(actual.size)
