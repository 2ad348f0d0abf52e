"""Runs samples, in this process and in ones of their own."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch
from click.testing import CliRunner

SAMPLES = Path(__file__).parents[2] / "samples"
# As where a sample is run: some import what they share.
sys.path.append(str(SAMPLES))


def run(*arguments: object, status: int = 0) -> str:
    """Run Python in a process of its own; the output is plain text, and nothing is written to stderr."""
    result = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stdout + result.stderr
    assert "\x1b" not in result.stdout and "\r" not in result.stdout
    return result.stdout


def sample(name: str, *arguments: object, status: int = 0) -> str:
    """Run a sample in this process, which has torch already."""
    with torch.random.fork_rng():
        result = CliRunner().invoke(loaded(name).main, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == status, result.output
    assert "\x1b" not in result.output and "\r" not in result.output
    return result.output


def numbers(pattern: str, output: str) -> list[float]:
    """The numbers that stand for `#` in a pattern."""
    found = re.search(pattern.replace("#", r"(\d+(?:\.\d+)?)"), output)
    assert found is not None, output
    return [float(group) for group in found.groups()]


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
