"""`nn.AdaptiveLogSoftmaxWithLoss` without its branches, which a graph does not have. This module imports torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import _torch_private as private
from gradfuse.export.torch_step import TorchStep

_CLASS = nn.AdaptiveLogSoftmaxWithLoss


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Let it be traced: clusters without rows are computed of none, and a wrong class is an error at run time."""
    original = _CLASS.forward
    _CLASS.forward = _forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _CLASS.forward = original  # type: ignore[method-assign]


def is_in(step: TorchStep) -> bool:
    """Whether a step has such a layer."""
    owners = [one for one in (step.module, step.loss) if isinstance(one, nn.Module)]
    return any(isinstance(one, _CLASS) for owner in owners for one in owner.modules())


def _forward(self: Any, input_: Tensor, target_: Tensor) -> Any:
    is_batched = target_.dim() > 0
    input, target = (input_, target_) if is_batched else (input_.unsqueeze(0), target_.unsqueeze(0))
    head = F.log_softmax(self.head(input), 1)
    # One past the end is refused by every runtime; a negative index would count from the end.
    place = torch.where(target < 0, self.head_size, target)
    output = input.new_zeros(target.shape)
    for number, (low, high) in enumerate(itertools.pairwise(self.cutoffs)):
        inside = (target >= low) & (target < high)
        rows = F.log_softmax(self.tail[number](input[inside]), 1)
        output[inside] = rows.gather(1, (target[inside] - low).unsqueeze(1)).squeeze(1).to(output.dtype)
        place = torch.where(inside, self.shortlist_size + number, place)
    output = output + head.gather(1, place.unsqueeze(1)).squeeze(1)
    return private.adaptive_softmax_output(output if is_batched else output.squeeze(0), (-output).mean())
