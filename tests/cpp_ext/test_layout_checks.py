"""The checks of arguments, reached from C++: for what onnxruntime itself never hands to a kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gradfuse.custom_ops import OPS

CPP_EXT = Path(__file__).resolve().parents[2] / "cpp_ext"
EXPECTED = """\
dense: ok
gaps: target is strided; expected a contiguous tensor
transposed: self is strided; expected a contiguous tensor
stride of a dimension of size 1: ok
empty: ok
type that the op does not take: grad_output is float64; expected float32, float16 or bfloat16
types that differ: target is float16; expected float32 as grad_output
bad values on the host: group_idx[1] is 9; expected 4: the last group ends with the last row of grad_y
values elsewhere: ok
type of an index: group_idx is bool; expected int64 or int32
"""


def test_layouts_and_types(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "layout_check"
    left_out = {operator.stem for operator in OPS.values()} - {"mse_loss_backward", "grouped_bias_add_grad"}
    checks = sorted(path for path in (CPP_EXT / "kernels").glob("*.cc") if path.stem not in left_out)
    sources = [CPP_EXT / "tests" / "layout_check.cc", *checks]
    includes = [f"-I{CPP_EXT}", f"-I{CPP_EXT / 'include'}"]
    subprocess.run([compiler, "-std=c++17", *includes, *map(str, sources), "-o", str(program)], check=True)
    result = subprocess.run([program], check=True, capture_output=True, text=True)
    assert result.stdout == EXPECTED
