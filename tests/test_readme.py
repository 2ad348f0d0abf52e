"""What README.md shows works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_exports_fuses_and_trains(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert len([line for line in example.splitlines() if line.strip()]) <= 16
    command = [sys.executable, "-c", example]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    output = result.stdout
    assert "CrossEntropyLossGrad" in output
    assert (tmp_path / "trained.safetensors").is_file()
    # Random labels of 32 points: guessing has loss log 5 = 1.61, and the module has parameters enough to learn them.
    loss = re.search(r"^loss (\d+\.\d+)$", output, re.MULTILINE)
    assert loss is not None
    assert float(loss[1]) < 0.5


def test_the_numbers_are_measured() -> None:
    rows = re.findall(r"^\| ([^|]+?), batch (\d+)[^|]*((?:\| [\d.]+ ms ){4})\|$", README, re.M)
    assert len(rows) >= 3
    measured = (ROOT / "benchmarks" / "results" / "step.md").read_text(encoding="utf-8")
    for _, batch, times in rows:
        plain, fused, torch, compiled = re.findall(r"[\d.]+", times)
        row = rf"^\| .+ \| {batch} \| {plain} \| {fused} \| [^|]+ \| {torch} \| {compiled} \|"
        assert re.search(row, measured, re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([\w-]+)(?=`|  )", (ROOT / page).read_text(encoding="utf-8"))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
