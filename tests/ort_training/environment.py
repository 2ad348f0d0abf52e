"""The environment with onnxruntime-training, which `make test-ort-training` makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv-ort-training"


def run(script: str, *arguments: object) -> None:
    """Run a script of this folder there."""
    path = Path(__file__).with_name(script)
    command = [str(FOLDER / "bin" / "python"), str(path), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
