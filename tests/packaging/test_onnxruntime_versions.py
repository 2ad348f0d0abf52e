"""One fused model file runs on the oldest supported onnxruntime and on the newest, with and without the library."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import small_models
import torch

import gradfuse
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "1.18.1"
# The oldest onnxruntime has wheels for no newer Python, and takes no newer numpy.
OLDEST_NUMPY = "1.26.4"
NEWEST_PYTHON_OF_OLDEST = (3, 12)

RUN_MODELS = """
import sys
sys.path.insert(0, sys.argv[1])
import gradfuse, numpy, onnxruntime
# The compiled library lies with the package that is installed for the tests.
gradfuse.__path__.append(sys.argv[2])
print(onnxruntime.__version__)
for stem in sys.argv[4:]:
    options = onnxruntime.SessionOptions()
    if sys.argv[3] == "kernels":
        gradfuse.register(options)
    session = onnxruntime.InferenceSession(stem + ".onnx", options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    numpy.savez(stem + ".out.npz", **dict(zip(names, session.run(names, dict(numpy.load(stem + ".in.npz"))))))
"""

TRAIN = """
import sys
sys.path.insert(0, sys.argv[1])
# All but onnxruntime and numpy is as in the environment of the tests.
sys.path += sys.argv[3:]
import gradfuse, numpy, onnxruntime
gradfuse.__path__.append(sys.argv[2])
print(onnxruntime.__version__)
session, rng = gradfuse.TrainingSession("step.onnx"), numpy.random.default_rng(0)
for i in range(8):
    x, y = rng.standard_normal((4, 6)).astype(numpy.float32), rng.integers(0, 5, 4)
    if i == 4:
        session.save("state.safetensors")
        session = gradfuse.TrainingSession("step.onnx")
        session.load("state.safetensors")
    print(session.step(x, y))
print(abs(session.evaluate(x)).sum())
"""

Arrays = dict[str, npt.NDArray[Any]]


def python_with_oldest() -> str:
    """Return the Python of an environment with the oldest onnxruntime, which is made once and kept."""
    if sys.version_info[:2] > NEWEST_PYTHON_OF_OLDEST:
        unavailable(f"onnxruntime {OLDEST} has no wheel for Python {sys.version_info[0]}.{sys.version_info[1]}")
    folder = ROOT / f".venv-ort-{OLDEST}"
    python = folder / "bin" / "python"
    with open(ROOT / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            wanted = ["--no-deps", f"onnxruntime=={OLDEST}", f"numpy=={OLDEST_NUMPY}"]
            for command in (
                [sys.executable, str(ROOT / "tools" / "create_venv.py"), str(folder)],
                [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *wanted],
            ):
                result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                if result.returncode:
                    unavailable(f"onnxruntime {OLDEST} cannot be installed: {' '.join(result.stdout.split())[-300:]}")
            (folder / "complete").touch()
    return str(python)


def unavailable(reason: str) -> None:
    """Skip, but for continuous integration, which must not lose this test unnoticed."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def inputs() -> dict[str, Arrays]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    mask = rng.random((2, 1, 6, 6)) < 0.4
    mask[..., 0] = False
    return {
        "cross_entropy": {"x": normal(7, 4), "target": rng.integers(0, 5, 7), "w": normal(4, 5)},
        "attention": {"scores": normal(2, 3, 6, 6), "mask": mask, "grad": normal(2, 3, 6, 6)},
    }


def torch_gradient(name: str, feeds: Arrays, dtype: torch.dtype) -> tuple[str, torch.Tensor]:
    """Return the name of a model's gradient, and PyTorch's own in a type."""
    tensors = {
        key: torch.from_numpy(value).to(dtype) if value.dtype == np.float32 else torch.from_numpy(value)
        for key, value in feeds.items()
    }
    if name == "cross_entropy":
        w = tensors["w"].requires_grad_()
        loss = torch.nn.functional.cross_entropy(tensors["x"] @ w, tensors["target"], reduction="sum")
        return "w_grad", torch.autograd.grad(loss, w)[0]
    scores = tensors["scores"].requires_grad_()
    prob = (scores * 0.5).masked_fill(tensors["mask"], -1e30).softmax(-1)
    return "scores_grad", torch.autograd.grad(prob, scores, tensors["grad"])[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fused models and their inputs."""
    folder = tmp_path_factory.mktemp("models")
    models = {"cross_entropy": small_models.cross_entropy(), "attention": small_models.attention()}
    for name, feeds in inputs().items():
        result = gradfuse.fuse(models[name])
        assert len(result.report.fusions) == 1
        onnx.save(result.model, folder / f"{name}.onnx")
        np.savez(folder / f"{name}.in.npz", allow_pickle=False, **feeds)
    return folder


@pytest.mark.parametrize("kernels", ["kernels", "bodies"])
@pytest.mark.parametrize("version", ["oldest", "newest"])
def test_one_file_runs_anywhere(version: str, kernels: str, folder: Path) -> None:
    python = python_with_oldest() if version == "oldest" else sys.executable
    stems = {name: str(folder / name) for name in inputs()}
    installed = Path(gradfuse.get_library_path()).parents[1]
    command = [python, "-c", RUN_MODELS, str(ROOT / "plugin"), str(installed), kernels, *stems.values()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert version == "newest" or result.stdout.split()[-1] == OLDEST
    for name, feeds in inputs().items():
        output, exact = torch_gradient(name, feeds, torch.float64)
        native = torch_gradient(name, feeds, torch.float32)[1]
        with np.load(f"{stems[name]}.out.npz") as outputs:
            assert_gradients_close(outputs[output], native, exact, np.float32)


def test_a_training_session_runs_on_the_oldest_as_on_the_newest(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # No bias ahead of the normalisation: its gradient would be rounding, of which Adam makes steps of full size.
    module = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))
    step = gradfuse.export_training_step(
        module,
        torch.nn.functional.cross_entropy,
        (torch.randn(4, 6), torch.randint(0, 5, (4,))),
        torch.optim.AdamW(module.parameters(), lr=0.01),
        accumulate=2,
        max_grad_norm=1.0,
    )
    step.save(tmp_path / "step.onnx")
    installed = Path(gradfuse.get_library_path()).parents[1]
    numbers = []
    for python in (python_with_oldest(), sys.executable):
        command = [python, "-c", TRAIN, str(ROOT / "plugin"), str(installed), *filter(None, sys.path)]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-2000:]
        numbers.append([float(line) for line in result.stdout.splitlines()[1:]])
    assert result.stdout.split()[0] != OLDEST
    assert len(numbers[0]) == 9
    # Sums are added up in other orders: each of eight steps may differ by some eight roundings.
    assert numbers[0] == pytest.approx(numbers[1], rel=8 * 8 * 2**-23)
