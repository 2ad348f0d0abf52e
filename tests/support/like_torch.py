"""Compares a step, run in onnxruntime, with PyTorch's own run of module and loss in float32 and float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from gradfuse import TrainingSession, TrainingStep, export_training_step
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


def by_sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def trains_like_torch(
    make: Callable[[], nn.Module],
    loss: Callable[..., Tensor],
    batches: Sequence[Any],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = by_sgd,
    **settings: Any,
) -> TrainingSession:
    """Export a step with the first of some batches, train on all of them, and compare losses and the final state.

    Args:
        make: returns the module, the same one each time.
        loss: the loss.
        batches: of the form that `export_training_step` takes.
        optimizer: makes one of parameters; its numbers are exact in float32.
        settings: those of `export_training_step`.
    """
    module = make()
    session = TrainingSession(
        export_training_step(module, loss, batches[0], optimizer(module.parameters()), **settings)
    )
    losses = [np.float32(session.step(*_pytree.tree_map_only(Tensor, Tensor.numpy, batch))) for batch in batches]
    (native, of_native), (exact, of_exact) = (
        _trained(make, loss, batches, optimizer, dtype) for dtype in (torch.float32, torch.float64)
    )
    dense = [name for name, one in exact.items() if one.layout == torch.strided]
    largest = 4 * max(
        float(exact[name].abs().max()) for name in dense if exact[name].numel() and exact[name].dtype != torch.bool
    )
    for got, own, wide in zip(losses, of_native, of_exact, strict=True):
        assert_gradients_close(got, own, wide, np.float32, terms=largest)
    state = session.state_dict()
    assert list(state) == dense
    for name in dense:
        result = state[name]
        if exact[name].is_floating_point():
            assert_gradients_close(result, native[name], exact[name], np.float32, terms=largest)
        else:
            np.testing.assert_array_equal(result, exact[name].numpy())
    return session


def _trained(
    make: Callable[[], nn.Module],
    loss: Callable[..., Tensor],
    batches: Sequence[Any],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    dtype: torch.dtype,
) -> tuple[Mapping[str, Tensor], list[Tensor]]:
    """Return the state of a module that PyTorch has trained in a type, and the losses."""
    module = make().to(dtype)
    updating = optimizer(module.parameters())
    losses = []
    for batch in batches:
        inputs, targets = _pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
        updating.zero_grad()
        value = called(loss, (called(module, (), inputs),), targets)
        value.backward()
        updating.step()
        losses.append(value.detach())
    return module.state_dict(), losses
