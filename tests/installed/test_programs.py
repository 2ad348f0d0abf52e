"""What C and C++ programs get of an installation, wherever it runs: here, or in an emulator.

GRADFUSE_PACKAGE names the folder of an installation that this Python cannot import, as it is for another system; CXX is
then a compiler whose programs run here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from installed.processor import assert_widest_loops

from gradfuse.custom_ops import OPS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpp_ext" / "tests" / "device"))
import capi_ops

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "cpp_ext" / "tests"
PRINTED = re.compile(r"^(\w+): (\S+) \.\.\. (\S+), [0-9a-f]{16}\s*$", re.MULTILINE)


@cache
def package() -> Path:
    """The folder of the installed package."""
    if "GRADFUSE_PACKAGE" in os.environ:
        return Path(os.environ["GRADFUSE_PACKAGE"])
    import gradfuse

    return Path(gradfuse.get_library_path()).parents[1]


def installed(*names: str) -> Path:
    """The one of these files that is among the libraries."""
    (found,) = (package() / "lib" / name for name in names if (package() / "lib" / name).is_file())
    return found


def compiled(source: Path, folder: Path, *options: str | Path) -> Path:
    """A program that is linked to the installed library of the C API."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = installed("libgradfuse_aclnn.so", "libgradfuse_aclnn.dylib", "gradfuse_aclnn.lib")
    program = folder / source.stem
    language = ["-x", "c"] if source.suffix == ".c" else ["-std=c++17"]
    command = [compiler, *language, "-O1", source, "-x", "none", *options, "-o", program]
    command += [
        f"-I{package() / 'include'}",
        f"-I{folder}",
        library,
        f"-Wl,-rpath,{library.parent}",
        "-pthread",
        "-ldl",
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def output_of(program: Path, *arguments: str | Path) -> str:
    environment = {**os.environ, "GRADFUSE_DEVICE": "cpu"}
    environment.pop("GRADFUSE_SIMD_TARGET", None)
    command = [str(word) for word in (program, *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def describe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    program = compiled(PROGRAMS / "describe.c", tmp_path_factory.mktemp("describe"))
    library = installed("libgradfuse.so", "libgradfuse.dylib", "gradfuse.dll")
    return lambda function: json.loads(output_of(program, library, function))


def test_all_loops_that_the_processor_runs_are_there(describe: Any) -> None:
    assert_widest_loops(describe("gradfuse_describe_simd_targets"))


def test_the_library_has_the_operators_of_the_package(describe: Any) -> None:
    assert {op["name"] for op in describe("gradfuse_describe_ops")} == set(OPS)


def test_a_program_gets_what_numpy_gives_of_every_operator(describe: Any, tmp_path: Path) -> None:
    capi_ops.write(tmp_path, {op["name"]: op for op in describe("gradfuse_describe_ops")})
    output = output_of(compiled(PROGRAMS / "capi_check.cc", tmp_path))
    printed: dict[str, tuple[float, float]] = {}
    for op, first, last in PRINTED.findall(output):
        printed.setdefault(op, (float(first), float(last)))
    assert set(printed) == set(OPS)
    for op, case in capi_ops.largest_cases().items():
        # The ends of the last output, with six digits.
        exact, bound = case.expected[-1], case.error_bounds()[-1]
        for got, at in zip(printed[op], (0, -1), strict=True):
            assert abs(got - exact.flat[at]) <= bound.flat[at] + 1e-5 * abs(exact.flat[at]), op


def test_many_threads_use_the_c_api_at_once(tmp_path: Path) -> None:
    assert output_of(compiled(PROGRAMS / "capi_threads.cc", tmp_path)).split() == ["0", "failures"]
