"""Gradient graphs of TensorFlow by tf2onnx, made by tests/corpus/tf2onnx_graphs.py: fused, and still right."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from producers import COMMITTED, run

from gradfuse import fuse
from gradfuse.testing import assert_gradients_close

FOLDER = COMMITTED / "tf2onnx"
EXPECTED = {
    "attention": ["ScaledMaskedSoftmaxBackward"],
    "batch_norm": ["BatchNormBackward"],
    "embedding": ["EmbeddingDenseBackward"],
    "layer_norm": ["LayerNormBackward"],
    "squared_error": ["MseLossBackward"],
    # Channels are last, and the operator has them second.
    "batch_norm_images": [],
    # The gradient is whole where the result is 0, and the operator's is 0 there.
    "maximum": [],
    # How many elements a mask keeps, and that it is one a row, the graph does not say.
    "boolean_mask": [],
    "boolean_mask_dyn": [],
    # One target might be added to the numbers of all rows: sizes of inputs have names of their own.
    "one_index_dyn": [],
}


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.onnx")))
def test_graph_is_fused_and_has_the_gradients_of_tensorflow(name: str) -> None:
    model = onnx.load(FOLDER / f"{name}.onnx")
    result = fuse(model, policy="all")
    found = Counter(fusion.op for fusion in result.report.fusions)
    if name in ("adam", "momentum"):
        # Keras's updates are not PyTorch's: epsilon, and the rate, are elsewhere.
        assert not found.keys() & {"ApplyAdamW", "ApplySgd"}
    else:
        assert list(found.elements()) == EXPECTED.get(name, ["CrossEntropyLossGrad"]), result.report
    assert not any(miss.bug for miss in result.report.near_misses)
    with np.load(FOLDER / f"{name}.npz") as file:
        feeds = {key.removeprefix("in."): file[key] for key in file.files if key.startswith("in.")}
        exact = {key.removeprefix("out."): file[key] for key in file.files if key.startswith("out.")}
    plain, got = run(model, feeds), run(result.model, feeds)
    largest = max(1.0, *(float(np.abs(array).max()) for array in exact.values()))
    for key, array in exact.items():
        assert_gradients_close(got[key], plain[key], array, np.float32, terms=4 * largest)
