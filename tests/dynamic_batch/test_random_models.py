"""Random models as exporters write them, folded for a fixed batch: with a free one, rows are those that they give."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import random_graphs
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph
from rows import assert_rows_agree, session

from gradfuse import ModelError, make_batch_dynamic

pytestmark = pytest.mark.usefixtures("inference_in_process")

ROUNDINGS = 2**14
"""Powers and logarithms on the way enlarge what one sum differs by."""


def _fixed(seed: int, path: Path) -> tuple[onnx.ModelProto, dict[str, int | None]] | None:
    """A model with a fixed batch, mostly folded by onnxruntime; None where it has other sizes, or is invalid."""
    rng = random.Random(seed)
    sizes = {"N": rng.choice([1, 1, 2, 3, 4]), "T": rng.choice([1, 3, 4, 5])}
    model = random_graphs.drawn(seed, plain=["fixed sizes", "minus one", "odd sizes"]).model
    weights = {tensor.name for tensor in model.graph.initializer}
    axes: dict[str, int | None] = {value.name: None for value in model.graph.input if value.name not in weights}
    for value in (*model.graph.input, *model.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param == "N" and value.name in axes:
                axes[value.name] = axis
            if dim.dim_param not in ("", *sizes):
                return None
            if dim.dim_param:
                dim.dim_value = sizes[dim.dim_param]
    del model.graph.value_info[:]
    try:
        if rng.random() < 0.7 and model.ir_version > 3:
            options = ort.SessionOptions()
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
            options.optimized_model_filepath, options.log_severity_level = str(path), 4
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            model = onnx.load(path)
        session(model)
    except (Fail, InvalidGraph):
        return None  # Its pieces do not take these sizes.
    return model, axes


def _sweep(first: int, last: int, path: Path) -> int:
    """Compare models; return of how many the rows were compared."""
    count = 0
    for seed in range(first, last):
        drawn = _fixed(seed, path)
        if drawn is None:
            continue
        fixed, axes = drawn
        try:
            free = make_batch_dynamic(fixed, axes)
        except ModelError as error:
            assert "stays fixed: " in str(error) or "not a valid" in str(error), (seed, str(error))
            continue
        try:
            count += bool(assert_rows_agree(fixed, free, axes, roundings=ROUNDINGS, seed=seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return count


def test_some_random_models(tmp_path: Path) -> None:
    assert _sweep(0, 25, tmp_path / "folded.onnx") >= 10


@pytest.mark.long
def test_many_random_models(tmp_path: Path) -> None:
    assert _sweep(25, 525, tmp_path / "folded.onnx") >= 300
