"""Exports in several threads, and in one another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from like_torch import assert_like_torch
from torch import Tensor, nn

from gradfuse import ExportError, TrainingSession, TrainingStep, export_training_step

SHAPES: Any = ({0: "batch"},), ({0: "batch"},)
SECONDS = 60.0


def _module(width: int) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3))


def _batch(items: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    torch.manual_seed(items)
    return (torch.randn(items, 4),), (torch.randn(items, 3),)


def _exported(module: nn.Module, **settings: Any) -> TrainingStep:
    return export_training_step(
        module, F.mse_loss, _batch(5), dynamic_shapes=SHAPES, fuse=False, verify="quick", **settings
    )


def _in_thread(function: Callable[[], Any]) -> Any:
    """Return what a function gives in a thread of its own, while this one waits."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, "the thread waits, or raised an error"
    return found[0]


def test_threads_export_at_the_same_time() -> None:
    modules = {width: _module(width) for width in (2, 3)}
    steps: dict[int, TrainingStep] = {}

    def export(width: int) -> None:
        steps[width] = _exported(modules[width])

    threads = [threading.Thread(target=export, args=(width,)) for width in (2, 3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for width in (2, 3):
        assert_like_torch(steps[width], modules[width], F.mse_loss, _batch(7))


def test_sessions_train_and_threads_compute_while_a_step_is_exported() -> None:
    session = TrainingSession(_exported(_module(2)))
    (x,), (y,) = _batch(7)
    losses: list[float] = []

    def progress(part: str, done: int, parts: int) -> None:
        losses.append(_in_thread(lambda: session.step(x.numpy(), y.numpy())))

    _exported(_module(3), progress=progress)
    assert len(losses) > 3


def test_an_export_that_fails_lets_others_begin() -> None:
    with pytest.raises(ExportError, match="loss is None, and the batch has targets"):
        export_training_step(_module(2), None, _batch(5))
    assert_like_torch(_in_thread(lambda: _exported(_module(2))), _module(2), F.mse_loss, _batch(7))


def test_a_function_that_is_told_of_progress_exports_too() -> None:
    inner: list[TrainingStep] = []

    def progress(part: str, done: int, parts: int) -> None:
        if not inner:
            inner.append(_exported(_module(3)))

    outer = _exported(_module(2), progress=progress)
    for width, step in ((2, outer), (3, inner[0])):
        assert_like_torch(step, _module(width), F.mse_loss, _batch(7))


def test_a_thread_that_begins_while_another_traces_waits() -> None:
    module, steps = _module(2), list[TrainingStep]()

    def export() -> None:
        end = time.monotonic() + SECONDS
        while not torch.compiler.is_exporting() and time.monotonic() < end:
            time.sleep(0.001)
        steps.append(_exported(module))

    thread = threading.Thread(target=export, daemon=True)
    thread.start()
    _exported(_module(3))
    thread.join(SECONDS)
    assert_like_torch(steps[0], module, F.mse_loss, _batch(7))


class _Exporting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            _exported(_module(2))
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_module_that_exports_while_it_is_traced_is_refused() -> None:
    with pytest.raises(ExportError, match="a step is exported while another is traced; expected no export in its"):
        export_training_step(_Exporting(), F.mse_loss, _batch(5))
