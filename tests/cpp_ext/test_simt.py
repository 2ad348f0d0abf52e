"""The machine that runs CUDA kernels in tests finds what it is there to find, and no kernel is left out."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
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
race of rounds: changes from run to run
no race: stays the same
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


@pytest.mark.slow
def test_kernels_agree_with_numpy_under_the_sanitizers() -> None:
    """What `make gpu-test` runs on a GPU, on the host machine: nothing is read or written out of bounds.

    To build them takes two minutes, so that `make test-slow` runs it.
    """
    program = CPP_EXT / "tests" / "device" / "gpu_test.py"
    result = subprocess.run([sys.executable, program, "--simt-sanitized"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    rows = re.findall(r"^(\w+) +(\w+) +(\d+) passed +0 failed$", result.stdout, re.MULTILINE)
    assert {(op, dtype) for op, dtype, _ in rows} == {(op, short(t)) for op in OPS for t in OPS[op].types}


def short(onnx_type: str) -> str:
    name = onnx_type.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)


@pytest.mark.long
def test_the_benchmark_runs(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    program = ROOT / "benchmarks" / "gpu_bench.py"
    command = [sys.executable, str(program), "--simt", "--output", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report, source = json.loads(output.read_text(encoding="utf-8")), program.read_text(encoding="utf-8")
    assert report["failures"] == []
    assert {row["op"] for row in report["rows"]} == set(OPS)
    for row in report["rows"]:
        assert row["milliseconds"] > 0 and row["bytes"] > 0
        # An op that the program has no sizes of is measured without PyTorch beside it.
        assert set(row["peers"]) == ({"torch"} if f'"{row["op"]}"' in source else set())


@pytest.mark.long
@pytest.mark.parametrize("source", sorted((CPP_EXT / "kernels" / "cuda").glob("*.cu")), ids=lambda path: path.stem)
def test_every_kernel_compiles_where_there_is_an_nvcc(source: Path, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc")
    # To PTX: what remains is the assembler's, and takes most of the time.
    options = ["-std=c++17", "-arch=compute_90", "--expt-relaxed-constexpr", "-diag-suppress", "2810"]
    command = [compiler, *options, f"-I{CPP_EXT}", f"-I{CPP_EXT / 'include'}", "-ptx", str(source)]
    result = subprocess.run([*command, "-o", str(tmp_path / "kernel.ptx")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    entries = (tmp_path / "kernel.ptx").read_text(encoding="utf-8").count(".entry")
    assert entries > 0 or source.stem == "fault"
