"""One more operator costs its own files and a row in two tables.

A copy of the project gets the operator SquareGrad: the files in toy_op/, which lie there as in the project, and the two
rows. Everything else follows: the copy is built, and what knows all operators knows this one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from completeness import FILES, missing_parts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpp_ext" / "tools"))
import device_library

ROOT = Path(__file__).resolve().parents[2]
TOY = Path(__file__).resolve().parent / "toy_op"
NAME, STEM = "SquareGrad", "square_grad"
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.so")


@dataclass(frozen=True)
class Copy:
    """A copy of the project, with a Python that imports gradfuse from it."""

    root: Path

    def run(self, *command: str | Path) -> str:
        """What a command prints that succeeds."""
        installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        variables = {
            "PYTHONPATH": os.pathsep.join([str(self.root / "plugin"), *sorted(installed)]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "GRADFUSE_ORT_INCLUDE_DIR": str(device_library.onnxruntime_headers()),
        }
        result = subprocess.run(
            [str(part) for part in command],
            cwd=self.root,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
        return result.stdout

    def python(self, *arguments: str | Path) -> str:
        """What the copy's Python prints."""
        return self.run(self.root / "venv" / "bin" / "python", *arguments)

    def passed(self, tests: Sequence[str], chosen: str) -> set[str]:
        """Run the tests of some files that a `-k` expression chooses; gives the files that have one that passed."""
        report = self.root / "report.xml"
        self.python("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", chosen, *tests)
        cases = list(ElementTree.parse(report).iter("testcase"))
        return {str(case.get("classname")).rsplit(".", 1)[-1] for case in cases if case.find("skipped") is None}


def add_row(path: Path, after: str, row: str) -> None:
    """Add text behind other text, which is in a file once."""
    text = path.read_text(encoding="utf-8")
    assert text.count(after) == 1
    path.write_text(text.replace(after, after + row), encoding="utf-8")


def copy_of_the_project(folder: Path) -> Copy:
    """The project as it is, its sources alone."""
    root = folder / "project"
    shutil.copytree(ROOT, root, symlinks=True, ignore=LEFT_OUT)
    return Copy(root)


def add_operator(copy: Copy) -> None:
    """The files of the new operator, none of which is there already, and its rows in the two tables."""
    for source in TOY.rglob("*"):
        target = copy.root / source.relative_to(TOY)
        if source.is_file() and source.suffix != ".pyc":
            assert not target.exists()
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    python_table = copy.root / "custom_ops" / "__init__.py"
    add_row(python_table, "\n    scaled_masked_softmax_backward,", f"\n    {STEM},")
    add_row(python_table, "\n            ctc_loss,", f"\n            {STEM},")
    table = copy.root / "cpp_ext" / "include" / "gradfuse" / "op_table.h"
    add_row(table, '#include "gradfuse/ops/scaled_masked_softmax_backward.h"', f'\n#include "gradfuse/ops/{STEM}.h"')
    add_row(table, "\n    GroupedBiasAddGradArgs", f", {NAME}Args")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    """A copy with the new operator, built for one instruction set: loops for others take minutes to compile."""
    folder = tmp_path_factory.mktemp("one_more_operator")
    made = copy_of_the_project(folder)
    add_operator(made)
    venv.create(made.root / "venv", symlinks=True)
    headers = f"-DGRADFUSE_ORT_INCLUDE_DIR={device_library.onnxruntime_headers()}"
    made.run("cmake", "-S", ".", "-B", "build/toy", "-G", "Ninja", "-DGRADFUSE_SIMD=OFF", headers)
    made.run("cmake", "--build", "build/toy")
    made.run("cmake", "--install", "build/toy", "--prefix", "plugin/gradfuse")
    made.python("tools/operator_tables.py")
    yield made
    shutil.rmtree(folder)


def test_its_own_files_and_two_rows_are_all_that_it_needs_by_hand(tmp_path: Path) -> None:
    copy = copy_of_the_project(tmp_path)
    assert {path.split(":")[0] for path in missing_parts(copy.root, NAME, STEM)} >= {
        path.format(stem=STEM) for path in FILES
    }
    add_operator(copy)
    (row,) = missing_parts(copy.root, NAME, STEM)
    assert row.endswith("which tools/operator_tables.py writes")


KNOWN = f"""
import ctypes, json, onnx, torch, gradfuse, gradfuse.torch
from gradfuse.custom_ops import OPS
schema = onnx.defs.get_schema("{NAME}", 1, "aclnn")
inputs = [input.name for input in schema.inputs]
x = torch.tensor([1.0, 2.0])
library = ctypes.CDLL(gradfuse.get_aclnn_library_path())
functions = [name for name in ("aclnn{NAME}GetWorkspaceSize", "aclnn{NAME}") if hasattr(library, name)]
print(json.dumps([inputs, torch.ops.aclnn.{STEM}(x, 3 * x).tolist(), functions, gradfuse.__file__]))
"""


@pytest.mark.slow
def test_what_knows_all_operators_knows_it(copy: Copy) -> None:
    inputs, product, functions, package = json.loads(copy.python("-c", KNOWN))
    assert package.startswith(str(copy.root))
    assert (inputs, product) == (["grad", "x"], [6.0, 24.0])
    assert functions == [f"aclnn{NAME}GetWorkspaceSize", f"aclnn{NAME}"]
    listed = json.loads(copy.python("-m", "gradfuse", "ops", "--json"))["ops"]
    assert NAME in {op["name"] for op in listed}
    assert list(missing_parts(copy.root, NAME, STEM)) == []


MODEL = f"""
import numpy, onnx, onnx_ir, onnxruntime, sys, gradfuse
from gradfuse.custom_ops import functions
head = '<ir_version: 10, opset_import: ["": 18, "aclnn": 1]> main'
text = head + '(float[N] g, float[N] x) => (float[N] y) {{ y = aclnn.{NAME}(g, x) }}'
feeds = {{"g": numpy.array([1, -1], numpy.float32), "x": numpy.array([2, 3], numpy.float32)}}
plain = onnx.parser.parse_model(text)
model = onnx_ir.from_proto(plain)
functions.attach(model)
with_body = onnx_ir.to_proto(model)
assert [function.name for function in with_body.functions] == ["{NAME}"]
options = onnxruntime.SessionOptions()
gradfuse.register(options)
for content, chosen in ((plain, options), (with_body, onnxruntime.SessionOptions())):
    session = onnxruntime.InferenceSession(content.SerializeToString(), chosen)
    print(session.run(None, feeds)[0].tolist())
"""


@pytest.mark.slow
def test_models_run_by_its_kernel_and_by_its_body(copy: Copy) -> None:
    assert copy.python("-c", MODEL).splitlines() == ["[4.0, -6.0]"] * 2


@pytest.mark.slow
def test_the_tests_of_all_operators_pass_for_it(copy: Copy) -> None:
    files = {
        "tests/custom_ops": {"test_bodies", "test_table", f"test_{STEM}"},
        "tests/cpp_ext/test_kernels.py": {"test_kernels"},
        f"tests/cpp_ext/test_{STEM}.py": {f"test_{STEM}"},
        "tests/cpp_ext/test_capi_arguments.py": {"test_capi_arguments"},
        "tests/cpp_ext/test_capi_views.py": {"test_capi_views"},
        "tests/cpp_ext/test_custom_ops.py": {"test_custom_ops"},
        "tests/cpp_ext/test_simd.py": {"test_simd"},
        "tests/cpp_ext/test_simt.py": {"test_simt"},
        "tests/cpp_ext/test_execution_provider.py": {"test_execution_provider"},
        "tests/torch_ops/test_ops.py": {"test_ops"},
    }
    assert copy.passed(list(files), f"{NAME} or {STEM}") == set().union(*files.values())


@pytest.mark.slow
def test_the_tests_of_the_tables_pass_with_it(copy: Copy) -> None:
    files = {
        "tests/custom_ops/test_table.py": {"test_table"},
        "tests/cpp_ext/test_custom_ops.py": {"test_custom_ops"},
        "tests/cpp_ext/test_capi_programs.py": {"test_capi_programs"},
        "tests/torch_ops/test_page.py": {"test_page"},
        "tests/plugin/test_cli.py": {"test_cli"},
    }
    chosen = (
        "tables or exactly or every_operator or every_header or exports or number_of_threads or schemas or test_ops"
    )
    assert copy.passed(list(files), chosen) == set().union(*files.values())


@pytest.mark.slow
def test_its_cuda_kernel_agrees_with_numpy(copy: Copy) -> None:
    printed = copy.python("cpp_ext/tests/device/gpu_test.py", "--simt", "--only", NAME)
    assert printed.count(NAME) == 3 and printed.count("  0 failed") == 3
