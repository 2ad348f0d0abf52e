"""What docs/torch.md shows works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

import gradfuse.torch
from gradfuse.custom_ops import OPS

PAGE = (Path(__file__).parents[2] / "docs" / "torch.md").read_text(encoding="utf-8")


def test_examples_run_in_processes_that_have_imported_nothing() -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(examples) == 3
    # One process for all: importing torch takes longer than they do.
    code = "".join(f"exec({example!r}, {{}})\n" for example in examples)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "tensor([4., 0., 6.], dtype=torch.bfloat16)" in result.stdout


def test_schemas_are_those_that_are_registered() -> None:
    (listed,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    registered = [getattr(torch.ops.aclnn, operator.stem).default._schema for operator in OPS.values()]
    assert [torch._C.parse_schema(line) for line in listed.splitlines()] == registered


def test_every_public_function_is_named() -> None:
    assert [name for name in gradfuse.torch.__all__ if f"`{name}" not in PAGE] == []
