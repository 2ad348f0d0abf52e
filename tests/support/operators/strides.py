"""Tensors of any strides that are not negative, for the tests of views."""

from __future__ import annotations

import random

import torch
from torch import Tensor

POISON = 77


def scattered(tensor: Tensor, rng: random.Random) -> Tensor:
    """The values of a tensor at odd places of a larger memory: dimensions in any order, gaps, an offset."""
    order = rng.sample(range(tensor.dim()), tensor.dim())
    strides = [0] * tensor.dim()
    step = rng.randint(1, 3)
    for axis in order:
        strides[axis] = step
        step *= max(tensor.shape[axis], 1) * rng.randint(1, 2) + rng.randint(0, 1)
    offset = rng.randint(0, 5)
    memory = torch.full((offset + step + 5,), POISON).to(tensor.dtype)
    view = memory.as_strided(tensor.shape, strides, offset)
    return view.copy_(tensor)


def repeated(tensor: Tensor, rng: random.Random) -> Tensor:
    """A tensor that is the same along some dimensions, which have stride 0."""
    narrow = tensor
    for axis in range(tensor.dim()):
        if tensor.shape[axis] and rng.random() < 0.4:
            narrow = narrow.narrow(axis, 0, 1)
    return scattered(narrow, rng).expand(tensor.shape)


def moved(tensor: Tensor, elements: int) -> Tensor:
    """A dense copy of a tensor that begins some elements after an aligned address."""
    memory = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)[elements:]
    return memory.copy_(tensor.reshape(-1)).view_as(tensor)
