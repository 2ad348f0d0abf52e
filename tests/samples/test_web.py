"""The sample in JavaScript trains as `TrainingSession` does: in Node, and in a browser, which is clicked through."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file
from sample_runs import SAMPLES, loaded, sample

from gradfuse import TrainingSession, export_training_step

pytestmark = pytest.mark.web

WEB = SAMPLES / "web"
MODEL = WEB / "model"
BATCH_SIZE = 64
NODE_EPOCHS = 3


@pytest.fixture(scope="module", autouse=True)
def exported() -> None:
    sample("web/export", "--folder", MODEL)


def shuffled(count: int, seed: int) -> list[int]:
    """The order of an epoch: Fisher and Yates with the numbers of mulberry32."""
    order, state, word = list(range(count)), seed, 2**32
    for last in range(count - 1, 0, -1):
        state = (state + 0x6D2B79F5) % word
        bits = (state ^ (state >> 15)) * (state | 1) % word
        bits ^= (bits + (bits ^ (bits >> 7)) * (bits | 61)) % word
        other = (bits ^ (bits >> 14)) % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def batches(steps: int) -> Iterator[tuple[Any, Any]]:
    data = load_file(MODEL / "digits.safetensors")
    images, labels = data["train_images"], data["train_labels"]
    epoch = 0
    while True:
        order = shuffled(len(labels), epoch)
        for begin in range(0, len(labels), BATCH_SIZE):
            if not steps:
                return
            steps -= 1
            rows = order[begin : begin + BATCH_SIZE]
            yield images[rows], labels[rows]
        epoch += 1


def cnn() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """What the sample trains."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = loaded("digits").Cnn()
    return module, torch.optim.Adam(module.parameters(), lr=2e-3)


def attention() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Another model and optimizer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = loaded("digits").RowAttention()
    return module, torch.optim.AdamW(module.parameters(), lr=2e-3)


Make = Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer]]


def trained(make: Make, steps: int, dtype: torch.dtype, moved: int | None = None) -> list[float]:
    """The losses of PyTorch; `moved` is the seed of moves of the parameters by up to one rounding of float32."""
    module, optimizer = make()
    if moved is not None:
        numbers = torch.Generator().manual_seed(moved)
        for parameter in module.parameters():
            moves = 2 * torch.rand(parameter.shape, generator=numbers) - 1
            parameter.data.mul_(1 + torch.finfo(torch.float32).eps * moves)
    module.to(dtype)
    losses = []
    for images, labels in batches(steps):
        loss = F.cross_entropy(module(torch.from_numpy(images).to(dtype)), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_trained(losses: list[float], make: Make = cnn, step: str = "step.onnx") -> TrainingSession:
    """Assert that losses, and those of a session, are as near to float64 as PyTorch's; return the session.

    Two values in a window of max pooling may be equal but for rounding, which decides where the gradient goes. From
    then on losses differ by far more than roundings, so PyTorch starts from moved parameters as well.
    """
    exact = np.array(trained(make, len(losses), torch.float64))
    native = np.array([trained(make, len(losses), torch.float32, seed) for seed in (None, *range(8))])
    session = TrainingSession(MODEL / step)
    python = np.array([session.step(*batch) for batch in batches(len(losses))])
    bound = 4 * (np.maximum.accumulate(np.abs(native - exact).max(0)) + np.finfo(np.float32).eps * exact)
    assert (np.abs(python - exact) <= bound).all()
    assert (np.abs(losses - exact) <= bound).all()
    return session


def node(program: Path, *arguments: object) -> str:
    result = subprocess.run(["node", program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.mark.parametrize("runtime", ["onnxruntime-node", "onnxruntime-web"])
def test_node_trains_as_python_does(runtime: str, tmp_path: Path) -> None:
    losses, values = tmp_path / "losses.json", tmp_path / "values.safetensors"
    output = node(
        WEB / "train_node.mjs", "--runtime", runtime, "--epochs", NODE_EPOCHS, "--losses", losses, "--save", values
    )
    found = json.loads(losses.read_text())
    assert len(found) == 23 * NODE_EPOCHS
    assert_trained(found)
    session = TrainingSession(MODEL / "step.onnx")
    session.load(values)
    data = load_file(MODEL / "digits.safetensors")
    accuracy = (session.evaluate(data["test_images"]).argmax(1) == data["test_labels"]).mean()
    assert f"epoch {NODE_EPOCHS}: loss {np.mean(found[-23:]):.4f}, test accuracy {accuracy:.2%}" in output


def evaluated(program: str) -> str:
    """What a program prints that has a `trainer`."""
    program = f"""
        import * as ort from "onnxruntime-node";
        import {{ readFile, writeFile }} from "node:fs/promises";
        import {{ Trainer }} from "./trainer.mjs";
        const trainer = await Trainer.create(ort, (name) => readFile(`model/${{name}}`));
        {program}
    """
    command = ["node", "--input-type=module", "--eval", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=WEB)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def changed_shape(values: dict[str, Any]) -> None:
    values["head.bias"] = values["head.bias"][:9]


def changed_type(values: dict[str, Any]) -> None:
    values["head.bias"] = values["head.bias"].astype(np.float64)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda values: values.pop("head.bias"), "head.bias is missing; expected float32[10]"),
        (changed_shape, "head.bias is float32[9]; expected float32[10]"),
        (changed_type, "head.bias is float64[10]; expected float32[10]"),
    ],
)
def test_values_of_another_step_are_refused(
    spoil: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    values = load_file(MODEL / "step.safetensors")
    spoil(values)
    save_file(values, tmp_path / "other.safetensors")
    output = evaluated(
        f"""
        const before = await trainer.save();
        try {{
          trainer.load(await readFile({json.dumps(str(tmp_path / "other.safetensors"))}));
        }} catch (error) {{
          console.log(error.message, Buffer.compare(before, await trainer.save()));
        }}
        """
    )
    assert output == f"{message} 0\n"


def test_a_checkpoint_of_python_is_taken(tmp_path: Path) -> None:
    session = TrainingSession(MODEL / "step.onnx")
    for batch in batches(2):
        session.step(*batch)
    session.save(tmp_path / "python.safetensors")
    # As of a tied or a frozen parameter.
    stored = {**load_file(tmp_path / "python.safetensors"), "again.weight": np.ones(3, np.float32)}
    save_file(stored, tmp_path / "python.safetensors")
    ours, theirs = (json.dumps(str(tmp_path / f"{name}.safetensors")) for name in ("javascript", "python"))
    evaluated(f"trainer.load(await readFile({theirs})); await writeFile({ours}, await trainer.save());")
    found = load_file(tmp_path / "javascript.safetensors")
    assert set(found) == set(session.ort_values)
    for name, value in session.ort_values.items():
        np.testing.assert_array_equal(found[name], value.numpy(), strict=True)


def browser(*arguments: object) -> dict[str, Any]:
    """What the page showed in Chromium."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        pytest.fail("there is no chromium; expected it on the path, or its path in CHROMIUM")
    seen: dict[str, Any] = json.loads(node(Path(__file__).with_name("browser.mjs"), chromium, *arguments))
    return seen


def test_webgpu_trains_as_python_does() -> None:
    """In software: the adapter of SwiftShader."""
    module, optimizer = attention()
    images, labels = map(torch.from_numpy, next(batches(1)))
    shapes = ({0: "batch"}, {0: "batch"})
    step = export_training_step(
        module, F.cross_entropy, (images, labels), optimizer, dynamic_shapes=shapes, fuse=False, float64=False
    )
    (MODEL / "attention").mkdir(exist_ok=True)
    step.save(MODEL / "attention" / "step.onnx", defaults=False)
    seen = browser()
    if "losses" not in seen:
        pytest.skip("this Chromium has no WebGPU")
    assert seen["complaints"] == []
    assert "· WebGPU ·" in seen["footer"]
    assert len(seen["losses"]) >= 8
    assert_trained(seen["losses"])
    losses, accuracy = seen["attention"]["losses"], seen["attention"]["accuracy"]
    assert len(losses) == 6
    session = assert_trained(losses, attention, "attention/step.onnx")
    data = load_file(MODEL / "digits.safetensors")
    read = session.evaluate(data["test_images"]).argmax(1)
    # One digit may be on the border.
    assert abs((read == data["test_labels"]).mean() - accuracy) <= 1 / len(read)


def test_the_page_trains_reads_drawings_and_keeps_the_weights(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    picture, values = tmp_path / "web.png", tmp_path / "values.safetensors"
    seen = browser(picture, values)
    assert seen["complaints"] == []
    assert seen["isolated"] and "WebAssembly, 2 threads" in seen["footer"]
    assert (seen["first"], seen["paused"], seen["continued"]) == ("Train", "Continue", "Continue")

    before, after = seen["before"], seen["after"]
    # It was stopped within an epoch, and went on in it after the page was loaded again.
    assert 5 * 23 < len(before["losses"]) < len(after["losses"])
    assert after["losses"][: len(before["losses"])] == before["losses"]
    assert f"after {len(before['losses'])} steps" in seen["notice"]
    assert seen["loss"] == f"{before['losses'][-1]:.4f}"
    assert seen["points"] == len(after["losses"])
    assert_trained(after["losses"])
    assert seen["accuracy"] == f"{after['accuracies'][-1]['accuracy']:.1%}"
    assert after["accuracies"][-1]["accuracy"] >= 0.95

    session = TrainingSession(MODEL / "step.onnx")
    session.load(values)
    assert session.ort_values["step"].numpy() == len(after["losses"])

    # Whoever draws like this has no trouble with the others; two may be read wrong.
    assert sum(read == drawn for drawn, read in enumerate(seen["read"])) >= 8
    assert seen["touched"] == [1, 0]
    assert seen["overflow"] == 0
    notice = "model/step.onnx is missing: run `python samples/web/export.py`"
    assert seen["missing"] == {"notice": notice, "disabled": True}
    assert seen["reset"] == {"train": "Train", "hidden": True}
    screenshot = request.config.getoption("--screenshot", default=None)
    if screenshot is not None:
        shutil.copyfile(picture, screenshot)
