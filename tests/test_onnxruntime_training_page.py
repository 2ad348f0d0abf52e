"""What docs/coming-from-onnxruntime-training.md shows of gradfuse works; tests/ort_training has the other side."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import gradfuse

PAGE = (Path(__file__).parents[1] / "docs" / "coming-from-onnxruntime-training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
CLASSIFIER = """
    <ir_version: 8, opset_import: ["": 17]>
    classifier (float[N, 4] x) => (float[N, 3] logits)
        <float[4, 3] weight = {1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0}, float[3] bias = {0, 0, 0}>
    {
        product = MatMul(x, weight)
        logits = Add(product, bias)
    }
"""
SCALAR = CLASSIFIER.replace("float[N, 3] logits)", "float mean)").replace(
    "\n    }", "\n        mean = ReduceMean<keepdims = 0>(logits)\n    }"
)
LOSS = """
    <ir_version: 8, opset_import: ["": 17]>
    loss (float[N, 3] output, float[N, 3] wanted) => (float value) {
        difference = Sub(output, wanted)
        distance = Abs(difference)
        value = ReduceMean<keepdims = 0>(distance)
    }
"""


def rows() -> list[tuple[str, str]]:
    """What the tables of the Python API say, left and right."""
    python = PAGE[: PAGE.index("## The C and C++ API")]
    cells = re.findall(r"^\| (.+?) \| (.+) \|$", python, re.MULTILINE)
    return [(left, right) for left, right in cells if left != "onnxruntime-training"]


def test_every_row_has_a_call_or_a_reason() -> None:
    assert len(rows()) > 60
    for left, right in rows():
        assert left.startswith(("`", "calling `")), left
        assert right.startswith("`") or re.match(r"none\b.*\bbecause\b", right), right


def test_the_calls_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(CLASSIFIER)
    x, labels = rng.standard_normal((8, 4)).astype(np.float32), rng.integers(0, 3, 8)
    names: dict[str, Any] = {"model": model, "x": x, "labels": labels, "batches": [(x, labels)] * 30, "np": np}
    names |= {"onnx": onnx, "scalar_model": onnx.parser.parse_model(SCALAR), "loss_text": LOSS}
    names |= {"loss_model": onnx.parser.parse_model(LOSS), "warmup": 3, "total": 30, "initial": 0.1}
    theirs, ours, schedule = BLOCKS
    assert "onnxruntime.training" in theirs
    exec(schedule, names)
    exec(ours, names)
    session, step = names["session"], names["step"]
    assert list(step.parameters) == ["weight"]
    served = onnxruntime.InferenceSession("served.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(served.run(None, {"x": x})[0], session.evaluate(x), rtol=1e-5)
    first = gradfuse.TrainingSession(step).step(x, labels)
    assert session.step_count == 30 and session.step(x, labels) < names["loss"] < first
    gradient_session = gradfuse.TrainingSession(gradfuse.build_training_step(model, "cross_entropy"))
    gradient_session.step(x, labels)
    weight = session.state_dict()["weight"]
    names |= {"gradient_session": gradient_session, "weight": weight, "parts": [weight]}
    names |= {"options": onnxruntime.SessionOptions(), "path": gradfuse.get_library_path()}
    names["folder"] = Path(__file__).parent / "plugin" / "artifacts" / "classifier"
    shutil.copy(names["folder"] / "trained", "trained")
    run = 0
    for left, right in rows():
        for code in re.findall(r"`([^`]+)`", right):
            # Single words are names of classes and arguments.
            if not right.startswith("none") and not re.fullmatch(r"\w+", code):
                exec(compile(code, left, "exec"), names)
                run += 1
    assert run > 60


def test_the_schedule_is_the_documented_one() -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[2], names)
    rates = [names["linear"](done, 3, 8, 0.1) for done in range(10)]
    np.testing.assert_allclose(rates, [0, 0.1 / 3, 0.2 / 3, 0.1, 0.08, 0.06, 0.04, 0.02, 0, 0], atol=1e-12)


@pytest.mark.parametrize("loss", ["CrossEntropyLoss", "MSELoss", "L1Loss", "BCEWithLogitsLoss"])
def test_the_losses_are_known(loss: str) -> None:
    assert any(f"LossType.{loss}" in left for left, _ in rows())
    assert any(f"loss.{loss}" in left for left, _ in rows())
