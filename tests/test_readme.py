"""What README.md shows works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradfuse import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_example_exports_fuses_and_trains(tmp_path: Path) -> None:
    (example,) = EXAMPLES
    assert len([line for line in example.splitlines() if line.strip()]) <= 22
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


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    gradfuse (.+)$", README, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["explain", "fuse", "check", "expand", "ops", "info"]
    (example,) = EXAMPLES
    exporting = example[: example.index("session =")].replace(
        "dynamic_shapes=shapes", "dynamic_shapes=shapes, fuse=False"
    )
    exec(exporting + 'step.save("step.onnx")', {})
    capsys.readouterr()
    output = {}
    for command in commands:
        assert cli.run(command.split()) == 0
        output[command] = capsys.readouterr().out
    (shown,) = re.findall(r"^```text\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert output["explain step.onnx"] == shown
    assert (tmp_path / "fused.onnx").is_file()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^):#]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake (\w+)(?=`|  )", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_table_of_warnings_is_complete() -> None:
    from gradfuse.passes.diagnosis.exporter_bugs import DETECTORS

    assert set(re.findall(r"^\| `([a-z-]+)` \|", README, re.MULTILINE)) == set(DETECTORS)


def test_the_table_of_operators_is_complete() -> None:
    from gradfuse import custom_ops

    assert set(re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", README, re.MULTILINE)) == set(custom_ops.OPS)
