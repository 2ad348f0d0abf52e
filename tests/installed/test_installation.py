"""What any installation does, asked of the package that is installed: with numpy and onnxruntime, and without PyTorch.

`make wheels` runs these tests with each wheel, in an environment of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from installed.one_node import ONNX_TYPES, feeds_of, model_of
from installed.processor import assert_widest_loops

import gradfuse
from gradfuse import runtime
from gradfuse.custom_ops import OPS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpp_ext" / "tests" / "device"))
from case import Case
from cases import cases


@cache
def library() -> Any:
    loaded = ctypes.CDLL(gradfuse.get_library_path())
    for name in ("gradfuse_describe_simd_targets", "gradfuse_simd_target", "gradfuse_describe_ops"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def test_all_loops_that_the_processor_runs_are_there_and_the_widest_are_used() -> None:
    offered = json.loads(library().gradfuse_describe_simd_targets())
    assert_widest_loops(offered)
    environment = {key: value for key, value in os.environ.items() if key != "GRADFUSE_SIMD_TARGET"}
    command = [sys.executable, "-m", "gradfuse", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout)["library"]["simd"] == offered[-1]


SUMS_NOTHING = runtime.is_at_least(1, 20)
"""Whether products in onnxruntime are 0 where they sum nothing; before, they are what was in memory, also in bodies."""
SUMS_OF_BODIES = 32
"""How much more than of a kernel's is allowed for the rounding on the way to a function body's results."""


def run(case: Case, *, kernel: bool) -> list[npt.NDArray[np.float64]]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if kernel:
        gradfuse.register(options)
    session = ort.InferenceSession(model_of(case, body=not kernel), options, providers=["CPUExecutionProvider"])
    return [np.asarray(result, np.float64) for result in session.run(None, feeds_of(case))]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.sampled(every=2)
def test_kernels_and_function_bodies_give_what_numpy_gives(op: str) -> None:
    ran = 0
    for case in cases(large=False, only=op):
        if case.fault != 0 or case.dtype not in ONNX_TYPES:
            continue
        assert case.problem(run(case, kernel=True)) == "", (case.name, case.dtype, "the kernel")
        if case.dtype == "float32" and (SUMS_NOTHING or all(np.size(one) for one in feeds_of(case).values())):
            # Sums of a body have no order that keeps their error small.
            body = replace(case, terms=[SUMS_OF_BODIES * np.asarray(terms) for terms in case.terms])
            assert body.problem(run(case, kernel=False)) == "", (case.name, "the function body")
        ran += 1
    assert ran > 2


def test_without_the_library_there_is_no_kernel_that_could_have_run() -> None:
    case = next(case for case in cases(large=False, only="MseLossBackward"))
    with pytest.raises(Exception, match="MseLossBackward"):
        ort.InferenceSession(model_of(case, body=False), providers=["CPUExecutionProvider"])


GRADIENT = """
<ir_version: 8, opset_import: ["": 17]>
gradient (float[N, 3] x, float[N, 3] y, float g) => (float[N, 3] dx) <float two = {2.0}> {
    difference = Sub(x, y)
    twice = Mul(difference, two)
    dx = Mul(twice, g)
}
"""


def test_a_gradient_is_fused_by_the_command_line_and_runs(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(GRADIENT), tmp_path / "gradient.onnx")
    command = [sys.executable, "-m", "gradfuse", "fuse", "gradient.onnx", "fused.onnx", "--policy", "all"]
    subprocess.run(command, cwd=tmp_path, check=True)
    fused = onnx.load(tmp_path / "fused.onnx")
    assert [node.op_type for node in fused.graph.node] == ["MseLossBackward"]


TWO_VARIANTS = """
<ir_version: 8, opset_import: ["": 17, "aclnn": 1]>
errors (float g, float[N, 2] x, int64[N] t) => (float[N, 2] a, float[N, 2] b) {
    a = aclnn.CrossEntropyLossGrad<reduction="sum">(g, x, t)
    b = aclnn.CrossEntropyLossGrad<reduction="mean">(g, x, t)
}
"""


def test_two_variants_of_a_body_are_told_apart_or_refused(tmp_path: Path) -> None:
    """onnxruntime before 1.27 gives all nodes of a function's name the same body, whatever their overloads are."""
    onnx.save(gradfuse.fuse(onnx.parser.parse_model(TWO_VARIANTS)).model, tmp_path / "model.onnx")
    even = np.full((2, 2), np.log(0.5), np.float32)
    feeds: dict[str, Any] = {"g": np.array(1, np.float32), "x": even, "t": np.array([0, 0])}
    for registered in (True, False):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        if registered:
            gradfuse.register(options)
        try:
            session = ort.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
            results = session.run(None, feeds)
        except Exception as error:
            assert not registered, error
            assert "FunctionOverloadsNeedOnnxruntime127" in str(error)
            assert tuple(map(int, ort.__version__.split(".")[:2])) < (1, 27)
        else:
            for got, size in zip(results, (0.5, 0.25), strict=True):
                np.testing.assert_allclose(got, [[-size, size]] * 2, rtol=float(4 * np.finfo(np.float32).eps))
