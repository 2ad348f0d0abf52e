"""Gradient graphs of onnxruntime-training, made by tests/ort_training/gradient_graphs.py: fused, and still right."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from gradient_graphs import NAMES, arrays, in_standard_operators, load
from producers import run

from gradfuse import fuse
from gradfuse.testing import assert_gradients_close

EXPECTED = {
    "gpt_rows_of_another_name": {"CrossEntropyLossGrad": 1, "ScaledMaskedSoftmaxBackward": 2, "LayerNormBackward": 3},
    "gpt_rows_of_the_same_name": {"CrossEntropyLossGrad": 1, "ScaledMaskedSoftmaxBackward": 1, "LayerNormBackward": 2},
    "gpt_ignored": {"CrossEntropyLossGrad": 1, "ScaledMaskedSoftmaxBackward": 1, "LayerNormBackward": 2},
    "gpt_internal": {"CrossEntropyLossGrad": 1, "ScaledMaskedSoftmaxBackward": 1, "LayerNormBackward": 2},
    "clip": {"CrossEntropyLossGrad": 2},
    "clip_internal": {"CrossEntropyLossGrad": 2},
    "clip_fixed": {"CrossEntropyLossGrad": 2},
    "squared_error": {"MseLossBackward": 1},
    "squared_error_weighted": {"MseLossBackward": 1},
}


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("name", NAMES)
def test_graph_is_fused_and_has_the_gradients_of_pytorch(name: str) -> None:
    result = fuse(load(name), policy="all")
    found = Counter(fusion.op for fusion in result.report.fusions)
    del found["GroupedBiasAddGrad"]
    assert found == EXPECTED.get(name, {"CrossEntropyLossGrad": 1}), result.report
    assert not any(miss.bug for miss in result.report.near_misses)
    got = run(in_standard_operators(result.model), arrays(name, "in"))
    exact = arrays(name, "out")
    largest = max(float(np.abs(array).max()) for array in exact.values())
    assert exact.keys() <= got.keys()
    for key, array in exact.items():
        assert_gradients_close(got[key], array.astype(np.float32), array, np.float32, terms=4 * max(1.0, largest))
