"""The samples on engines that gradfuse does not need: each compares itself with one process, and says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sample_runs import SAMPLES


def output(name: str, *options: str) -> str:
    result = subprocess.run(
        [sys.executable, str(SAMPLES / name), *options], capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.long
def test_ray_train() -> None:
    pytest.importorskip("ray.train")
    assert re.match(
        r"2 workers of Ray .*: 50 steps, loss ", output("ray_train.py", "--steps", "50", "--accuracy", "0.5")
    )


@pytest.mark.long
def test_flower(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    text = output("flower_lora.py", "--rounds", "2", "--wanted", "0.5", "--keep", str(tmp_path))
    assert re.match(r"3 clients with \d+, \d+, \d+ digits, 2 rounds: accuracy on negatives ", text)
    assert (tmp_path / "federated.onnx_adapter").exists()
