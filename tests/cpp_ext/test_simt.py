"""The machine that runs CUDA kernels in tests finds what it is there to find, and no kernel is left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gradfuse.custom_ops import OPS

ROOT = Path(__file__).resolve().parents[2]
CPP_EXT = ROOT / "cpp_ext"
EXPECTED = """\
sum: 2016.000000
missed barrier: simt: divergence: of 64 threads 40 wait at a barrier, 0 in a warp, 24 have returned
missed shuffle: simt: divergence: of 64 threads 0 wait at a barrier, 62 in a warp, 2 have returned
mixed shuffles: simt: lanes of a warp that meet in different operations
misaligned: simt: a store to a misaligned address
unwritten shared memory: nan
race: changes from run to run
sum after all that: 2016.000000
"""


def stem_of(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("name", OPS)
def test_every_operator_has_cuda_kernels_and_its_tests_run_them(name: str) -> None:
    stem = stem_of(name)
    kernel = (CPP_EXT / "kernels" / "cuda" / f"{stem}.cu").read_text(encoding="utf-8")
    assert f"Status Run(const {name}Args& args, const Queue& queue)" in kernel
    tests = (ROOT / "tests" / "cpp_ext" / f"test_{stem}.py").read_text(encoding="utf-8")
    assert '\npytestmark = pytest.mark.usefixtures("device")\n' in tests


def test_errors_of_kernels_are_found(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "simt_check"
    sources = [CPP_EXT / "tests" / "simt" / name for name in ("simt.cc", "simt_check.cc")]
    options = ["-std=c++17", "-Wno-unknown-pragmas", "-DGRADFUSE_SIMT", f"-I{CPP_EXT}", f"-I{CPP_EXT / 'include'}"]
    subprocess.run([compiler, *options, *map(str, sources), "-o", str(program)], check=True)
    result = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout == EXPECTED
