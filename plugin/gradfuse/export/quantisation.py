"""Modules of torch.ao.quantization that quantise while they train: what they observe must stay.

Nothing of it is imported unless the caller has.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from gradfuse.export.reporting import refusal

_MODULE = "torch.ao.quantization.fake_quantize"


def refuse_observers(owner: Any) -> None:
    """Refuse modules whose observers change their scales from step to step."""
    known = sys.modules.get(_MODULE)
    if known is None or not isinstance(owner, nn.Module):
        return
    for name, part in owner.named_modules():
        if isinstance(part, known.FakeQuantizeBase) and bool(part.observer_enabled[0] == 1):
            where = f"the part {name!r}" if name else "the module"
            raise refusal(
                f"{where} ({type(part).__name__}) observes what it quantises, which changes its scale in each step; "
                "expected observers that are turned off: module.apply(torch.ao.quantization.disable_observer)"
            )


@contextlib.contextmanager
def without_observers() -> Iterator[None]:
    """Have modules that observe and quantise in one operator quantise alone."""
    known = sys.modules.get(_MODULE)
    if known is None:
        yield
        return
    fused = known.FusedMovingAvgObsFakeQuantize
    forward = fused.forward
    fused.forward = known.FakeQuantize.forward
    try:
        yield
    finally:
        fused.forward = forward
