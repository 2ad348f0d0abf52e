"""The loops of docs/from-a-training-script.md train alike in PyTorch and with gradfuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from gradfuse.testing import assert_gradients_close

PAGE = (Path(__file__).parents[2] / "docs" / "from-a-training-script.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INTRODUCTION, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
LOOPS = [section for section in SECTIONS if PYTHON.search(section)]


def losses(monkeypatch: pytest.MonkeyPatch, setup: str, loop: str, dtype: torch.dtype) -> npt.NDArray[Any]:
    """The losses of a loop in a type; in float64 it begins with the values and draws of float32."""

    def widened(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *sizes: draw(*sizes).double()

    names: dict[str, Any] = {}
    (imports,) = PYTHON.findall(INTRODUCTION)
    exec(imports, names)
    with monkeypatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(torch, "randn", widened(torch.randn))
            patch.setattr(torch, "rand", widened(torch.rand))
        torch.manual_seed(0)
        exec(setup, names)
        for value in names.values():
            if isinstance(value, nn.Module):
                value.to(dtype)
        torch.manual_seed(0)
        exec(loop, names)
    return np.array(names["losses"], np.float64 if dtype == torch.float64 else np.float32)


@pytest.mark.parametrize("section", LOOPS, ids=lambda section: section.splitlines()[0])
@pytest.mark.sampled(every=2)
def test_both_loops_train_alike(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setup, native, ours = PYTHON.findall(section)
    exact = losses(monkeypatch, setup, native, torch.float64)
    in_torch = losses(monkeypatch, setup, native, torch.float32)
    assert np.abs(exact[-1] - exact[0]).max() > 1e-3
    assert_gradients_close(losses(monkeypatch, setup, ours, torch.float32), in_torch, exact, np.float32)


def test_every_loop_is_tested() -> None:
    assert len(LOOPS) == 5
