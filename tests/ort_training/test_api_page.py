"""docs/coming-from-onnxruntime-training.md has every name of 1.19.2, and both of its examples train alike."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from ort_training import environment
from test_onnxruntime_training_page import BLOCKS, CLASSIFIER, PAGE

pytestmark = pytest.mark.ort_training


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("example")
    (folder / "example.py").write_text(BLOCKS[0], encoding="utf-8")
    before = Path.cwd()
    os.chdir(folder)
    try:
        environment.run("api_page.py", "example.py", "result.json")
    finally:
        os.chdir(before)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def test_every_name_has_a_row(theirs: dict[str, Any]) -> None:
    lefts = re.findall(r"^\| (.+?) \| .+ \|$", PAGE, re.MULTILINE)
    listed = {re.split(r"[(=]", code)[0] for left in lefts for code in re.findall(r"`([^`]+)`", left)}
    missing = [name for name in theirs["names"] if name not in listed]
    assert not missing
    assert len(theirs["names"]) > 90


def test_both_examples_train_alike(theirs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((8, 4)).astype(np.float32), rng.integers(0, 3, 8)
    ours: dict[str, Any] = {"model": onnx.parser.parse_model(CLASSIFIER), "batches": [(x, labels)] * 30}
    exec(BLOCKS[1], ours)
    # Epsilon is in another place of the update, and is 1e-6.
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-4)
    np.testing.assert_allclose(ours["session"].state_dict()["weight"], theirs["weight"], atol=1e-4)
    np.testing.assert_allclose(ours["session"].evaluate(x), theirs["served"], atol=1e-3)


def test_the_schedule_is_that_of_exchanged_counts(theirs: dict[str, Any]) -> None:
    ours: dict[str, Any] = {}
    exec(BLOCKS[2], ours)
    documented = [ours["linear"](done, 3, 8, 0.1) for done in range(10)]
    np.testing.assert_allclose(theirs["rates"]["exchanged"], documented, atol=1e-6)
    wrong = [0.1 * done / 8 if done < 8 else 0.0 for done in range(10)]
    np.testing.assert_allclose(theirs["rates"]["as documented"], wrong, atol=1e-6)
