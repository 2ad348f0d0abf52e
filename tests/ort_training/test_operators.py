"""Operators that `to_stock` replaces, against onnxruntime-training's own kernels and PyTorch in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from ort_training import environment
from ort_training.operator_cases import CASES

pytestmark = pytest.mark.ort_training


@pytest.fixture(scope="module")
def kernel_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what onnxruntime-training's kernels give."""
    folder = tmp_path_factory.mktemp("operators")
    for index, case in enumerate(CASES):
        model, feeds = case.model()
        onnx.save(model, folder / f"{index}.onnx")
        np.savez(folder / f"{index}.npz", allow_pickle=False, **feeds)
    environment.run("run_models.py", folder)
    return folder


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{k}-{case.op_type}" for k, case in enumerate(CASES)])
def test_replacement_is_as_near_to_pytorch_as_the_kernel(index: int, kernel_results: Path) -> None:
    with np.load(kernel_results / f"{index}.outputs.npz") as native:
        CASES[index].require_replacement([native[name] for name in native.files], opset=17)
