"""Gradient graphs that jax_layers, tf2onnx_graphs and torch_layers of tests/corpus made: fused, and still right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from producers import COMMITTED, run

from gradfuse import explain, fuse
from gradfuse.testing import assert_gradients_close

OF_PYTORCH = {
    **dict.fromkeys(("adam", "adamw"), "ApplyAdamW"),
    **dict.fromkeys(("sgd", "sgd_nesterov"), "ApplySgd"),
    **dict.fromkeys(("layer_norm", "layer_norm_plain", "group_norm"), "LayerNormBackward"),
    "max_pool": "MaxPoolBackward",
    **dict.fromkeys(("gelu", "gelu_tanh"), "GeluBackward"),
    "embedding": "EmbeddingDenseBackward",
    "relu": "ThresholdBackward",
}
EXPECTED = {
    "attention": ["ScaledMaskedSoftmaxBackward"],
    "batch_norm": ["BatchNormBackward"],
    "embedding": ["EmbeddingDenseBackward"],
    "layer_norm": ["LayerNormBackward"],
    "squared_error": ["MseLossBackward"],
    "batch_norm_images": ["BatchNormBackward"],
    "momentum": ["ApplySgd"],
    # An infinite mean of squares becomes NaN in v + (g^2 - v) (1 - beta), and in what the operator gets.
    "adam": ["ApplyAdamW"],
    # The gradient is whole where the result is 0, and the operator's is 0 there.
    "maximum": [],
    # How many elements a mask keeps, and that it is one a row, the graph does not say.
    "boolean_mask": [],
    "boolean_mask_dyn": [],
    # One target might be added to the numbers of all rows: sizes of inputs have names of their own.
    "one_index_dyn": [],
}
OF_JAX = {
    **dict.fromkeys(("layer_norm", "layer_norm_variance", "rms_norm"), "LayerNormBackward"),
    **dict.fromkeys(("adam", "adamw"), "ApplyAdamW"),
    **dict.fromkeys(("sgd", "sgd_nesterov", "momentum"), "ApplySgd"),
    **{f"batch_norm{end}": "BatchNormBackward" for end in ("", "_variance", "_images", "_images_variance")},
    **{f"embedding{end}": "EmbeddingDenseBackward" for end in ("", "_take", "_one_hot")},
    "gelu": "GeluBackward",
    "logsumexp": "CrossEntropyLossGrad",
    "softmax_columns": "ScaledMaskedSoftmaxBackward",
    "squared_error": "MseLossBackward",
    # The gradient is 0 where the result is NaN.
    "relu": "",
    # Where rounding makes the variance negative, it has another gradient.
    **{f"{name}_squares": "" for name in ("layer_norm", "batch_norm", "batch_norm_images")},
}


def _paths(folder: str) -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in sorted((COMMITTED / folder).glob("*.onnx"))]


def _fused(path: Path) -> list[str]:
    """What was fused in a model, once its results have been compared with the producer's in float64."""
    model = onnx.load(path)
    result = fuse(model, policy="all")
    assert not any(miss.bug for miss in result.report.near_misses)
    with np.load(path.with_suffix(".npz")) as file:
        feeds = {key.removeprefix("in."): file[key] for key in file.files if key.startswith("in.")}
        exact = {key.removeprefix("out."): file[key] for key in file.files if key.startswith("out.")}
    plain, got = run(model, feeds), run(result.model, feeds)
    largest = max(1.0, *(float(np.abs(array).max()) for array in exact.values()))
    for key, array in exact.items():
        if array.dtype.kind == "i":
            np.testing.assert_array_equal(got[key], array)
            continue
        assert_gradients_close(got[key], plain[key], array, np.float32, terms=4 * largest)
    return [fusion.op for fusion in result.report.fusions]


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("path", _paths("tf2onnx"))
def test_graph_of_tensorflow_is_fused_and_has_its_gradients(path: Path) -> None:
    found = _fused(path)
    assert found == EXPECTED.get(path.stem, ["CrossEntropyLossGrad"])


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("path", _paths("jax_layers"))
def test_graph_of_jax_is_fused_and_has_its_gradients(path: Path) -> None:
    found, wanted = _fused(path), OF_JAX[path.stem]
    # What is weighted by the slope of a tanh is a squared error's gradient too, by its form.
    assert {*found} - {"MseLossBackward", wanted} == set()
    assert not wanted or found.count(wanted) == 1


@pytest.mark.parametrize(
    ("folder", "name", "operator", "reason"),
    [
        ("tf2onnx", "boolean_mask", "CrossEntropyLossGrad", "picks one class of each row"),
        ("tf2onnx", "one_index_dyn", "CrossEntropyLossGrad", "sizes of inputs that may differ"),
        ("tf2onnx", "maximum", "ThresholdBackward", "whole where the result is 0"),
        ("ort_module", "relu", "ThresholdBackward", "0 where the result is NaN"),
        ("jax_layers", "relu", "ThresholdBackward", "0 where the result is NaN"),
        ("jax_layers", "layer_norm_squares", "LayerNormBackward", "variance that is cut at 0"),
        ("jax_layers", "batch_norm_squares", "BatchNormBackward", "variance that is cut at 0"),
    ],
)
def test_explain_says_why_a_graph_is_not_fused(folder: str, name: str, operator: str, reason: str) -> None:
    regions = explain(COMMITTED / folder / f"{name}.onnx").regions
    assert any(region.op == operator and reason in region.reason for region in regions), regions


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("path", _paths("torch_layers"))
def test_graph_of_pytorch_is_fused_and_has_its_gradients(path: Path) -> None:
    # Sums of AOTAutograd's group normalization are in other dimensions than what they go into.
    wanted = [] if path.stem == "group_norm.joint" else [OF_PYTORCH[path.stem.split(".")[0]]]
    assert _fused(path) == wanted


@pytest.mark.parametrize("name", ["adam.foreach", "adam.single", "adamw.foreach", "adamw.single"])
def test_updates_of_an_optimizer_stand_the_check(name: str) -> None:
    assert fuse(COMMITTED / "torch_layers" / f"{name}.onnx", check=3).report.fusions
