"""Compares a step, run in onnxruntime, with PyTorch's own run of module and loss in float32 and float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from gradfuse import TrainingSession, TrainingStep
from gradfuse.testing import assert_gradients_close


def called(function: Callable[..., Any], first: tuple[Any, ...], given: Any) -> Any:
    """Call a function with a part of a batch."""
    if isinstance(given, Mapping):
        return function(*first, **given)
    if given is None:
        return function(*first)
    return function(*first, *(given if isinstance(given, (tuple, list)) else (given,)))


def by_torch(module: nn.Module, loss: Callable[..., Tensor], batch: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Loss, gradients and buffers of PyTorch's autograd in a type."""
    module = copy.deepcopy(module).to(dtype)
    inputs, targets = _pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
    value = called(loss, (called(module, (), inputs),), targets)
    value.backward()
    gradients = {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in module.named_parameters()
        if one.requires_grad
    }
    return {"loss": value.detach().reshape(()), **gradients, **dict(module.named_buffers())}


def assert_like_torch(step: TrainingStep, module: nn.Module, loss: Callable[..., Tensor], batch: Any) -> None:
    """Compare one step without an optimizer, from the parameters of the module on."""
    session = TrainingSession(step)
    value = session.step(*batch)
    state = session.state_dict()
    got = {"loss": np.float32(value), **session.gradients}
    got |= {name: state[name] for name, _ in module.named_buffers() if name in state}
    native, exact = (by_torch(module, loss, batch, dtype) for dtype in (torch.float32, torch.float64))
    # Roundings of one layer pass through the next ones, so that the largest gradient of the step measures them all.
    terms = 4 * max(float(exact[name].abs().max()) for name in session.gradients)
    for name, result in got.items():
        if exact[name].is_floating_point():
            assert_gradients_close(result, native[name], exact[name], np.float32, terms=terms)
        else:
            np.testing.assert_array_equal(result, exact[name].numpy())
