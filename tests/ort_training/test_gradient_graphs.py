"""Gradient graphs as onnxruntime-training 1.19.2 builds them, and what fuse makes of them, in its own kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gradient_graphs import NAMES, without_yield
from ort_training import environment

import gradfuse
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.ort_training


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the graphs give, original and fused."""
    produced, folder = tmp_path_factory.mktemp("produced"), tmp_path_factory.mktemp("results")
    environment.run("gradient_graphs.py", produced)
    for path in produced.glob("*.onnx"):
        with np.load(path.with_suffix(".npz")) as file:
            feeds = {key.removeprefix("in."): file[key] for key in file.files if key.startswith("in.")}
            exact = {key.removeprefix("out."): file[key] for key in file.files if key.startswith("out.")}
        # The bodies stand in the place of their nodes: 1.19.2 ignores overloads, which several bodies of a name need.
        fused = gradfuse.expand(gradfuse.fuse(ir.load(path), policy="all").model)
        for name, model in (("original", ir.load(path)), ("fused", fused)):
            onnx.save(ir.to_proto(without_yield(model)), folder / f"{path.stem}.{name}.onnx")
            np.savez(folder / f"{path.stem}.{name}.npz", allow_pickle=False, **feeds)
        np.savez(folder / f"{path.stem}.exact", allow_pickle=False, **exact)
    environment.run("run_models.py", folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_fused_graph_is_as_near_to_pytorch_as_the_original(name: str, results: Path) -> None:
    original, fused = (np.load(results / f"{name}.{which}.outputs.npz") for which in ("original", "fused"))
    with np.load(results / f"{name}.exact.npz") as exact:
        largest = max(float(np.abs(exact[key]).max()) for key in exact.files)
        for key in exact.files:
            assert_gradients_close(fused[key], original[key], exact[key], np.float32, terms=max(1.0, largest))
