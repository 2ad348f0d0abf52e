"""The sample in C++, built with onnxruntime's own library from Python's wheel, trains as `TrainingSession` does."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file
from sample_runs import SAMPLES, loaded, sample

import gradfuse
from gradfuse import TrainingSession

sys.path.insert(0, str(SAMPLES.parent / "cpp_ext" / "tools"))
import device_library

pytestmark = pytest.mark.long

EPOCHS = 3
BATCH_SIZE = 64


def run(*command: object, status: int = 0) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stdout + result.stderr
    return result.stderr if status else result.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.1*")
    cmake = Path(sys.executable).with_name("cmake")
    places = [
        f"-DONNXRUNTIME_INCLUDE_DIR={device_library.onnxruntime_headers()}",
        f"-DONNXRUNTIME_LIBRARY={library}",
    ]
    run(cmake, "-S", SAMPLES / "cpp", "-B", folder, "-DCMAKE_CXX_FLAGS=-Werror", *places)
    run(cmake, "--build", folder)
    return folder / "train"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sample("cpp/export", folder)
    return folder


def batches() -> Iterator[tuple[Any, Any]]:
    data = loaded("digits").Digits.load(0)
    for begin in range(0, len(data.train_labels), BATCH_SIZE):
        yield data.train_images[begin : begin + BATCH_SIZE], data.train_labels[begin : begin + BATCH_SIZE]


@pytest.mark.parametrize("kernels", [False, True])
def test_it_trains_as_python_does(program: Path, folder: Path, kernels: bool) -> None:
    output = run(program, folder, EPOCHS, *([gradfuse.get_library_path()] if kernels else []))
    found = re.findall(r"epoch (\d+): loss (\S+), test accuracy (\S+)%\n", output)
    options = onnxruntime.SessionOptions()
    if kernels:
        gradfuse.register(options)
    session = TrainingSession(folder / "step.onnx", session_options=options)
    data = loaded("digits").Digits.load(0)
    wanted = []
    for epoch in range(EPOCHS):
        loss = np.mean([session.step(*batch) for batch in batches()], dtype=np.float64)
        accuracy = (session.evaluate(data.test_images).argmax(1) == data.test_labels).mean()
        wanted.append((str(epoch + 1), f"{loss:.6f}", f"{100 * accuracy:.2f}"))
    assert found == wanted
    # The same kernels on as many threads: the same bits.
    stored = load_file(folder / "trained.safetensors")
    assert set(stored) == set(session.ort_values)
    for name, value in session.ort_values.items():
        np.testing.assert_array_equal(stored[name], value.numpy(), strict=True)
    # From there Python trains on.
    resumed = TrainingSession(folder / "step.onnx", session_options=options)
    resumed.load(folder / "trained.safetensors")
    batch = next(batches())
    assert resumed.step(*batch) == session.step(*batch)


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        ((), 2, r"usage: \S+train FOLDER EPOCHS \[LIBRARY\]\n"),
        (("{folder}", "many"), 2, r"usage: \S+train FOLDER EPOCHS \[LIBRARY\]\n"),
        (("/nowhere", 1), 1, r"\S+train: /nowhere/train_images\.bin: cannot be read\n"),
        (("{folder}", 1, "/nowhere.so"), 1, r"\S+train: .*/nowhere\.so: cannot open shared object file.*\n"),
    ],
)
def test_misuse_is_one_clear_line(
    program: Path, folder: Path, arguments: tuple[object, ...], status: int, message: str
) -> None:
    given = [str(argument).format(folder=folder) for argument in arguments]
    assert re.fullmatch(message, run(program, *given, status=status))
