"""Where code calls torch, and runs of a step's forward pass in which that is observed. This module imports torch."""

from __future__ import annotations

import dis
import inspect
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from gradfuse.export import explaining
from gradfuse.export.torch_step import TorchStep
from gradfuse.export.translation import lengths_as_tensors

Place = tuple[CodeType, int]
"""Where code calls: a function, and the offset of the instruction in it."""

ASKS = (torch.Tensor.__bool__, torch.Tensor.item)
"""Functions by which code asks for a truth value."""

_ROUNDINGS = 64
"""By how many roundings a sum may differ if zeros are added to it."""
_TWO_INSTRUCTIONS = 4
"""How far the second instruction of a call is from the first one, which is followed by a cache."""


def caller() -> Place:
    """Return where the code is that called the mode whose method calls this, or a mode within that one."""
    frame = calling_frame()
    return frame.f_code, offset(frame)


def callers(most: int) -> set[CodeType]:
    """Return the code that called the mode whose method calls this, and of what called that, of users' functions."""
    frame: FrameType | None = calling_frame()
    found: set[CodeType] = set()
    while frame is not None and len(found) < most:
        if explaining.is_users(frame.f_code.co_filename):
            found.add(frame.f_code)
        frame = frame.f_back
    return found


def calling_frame() -> FrameType:
    """Return the frame of the code that called the mode whose method, or a function of it, calls this."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    frame = frame.f_back
    while frame.f_code in (caller.__code__, callers.__code__) or frame.f_code.co_name == "__torch_function__":
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def offset(frame: FrameType) -> int:
    """Return where a frame is, the same each time that its code runs.

    Python 3.11 makes a call in two instructions until it has seen what is called, and then in the first of them.
    """
    first = dis.opmap.get("PRECALL")
    return frame.f_lasti + _TWO_INSTRUCTIONS * (frame.f_code.co_code[frame.f_lasti] == first)


def line_of(place: Place) -> tuple[str, int]:
    """Return the file and the line of a place."""
    code, offset = place
    lines = [line for start, end, line in code.co_lines() if start <= offset < end]
    return code.co_filename, lines[0] if lines and lines[0] is not None else code.co_firstlineno


def forward(step: TorchStep) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the forward pass on copies of all tensors; return the loss and the buffers afterwards."""

    def copies(tensors: Any) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in tensors]

    state = dict(zip(step.state, copies(step.state.values()), strict=True))
    for name in step.trainable:
        state[name].requires_grad_()
    with lengths_as_tensors():
        value, after, _ = step.apply(state, copies(step.inputs), copies(step.targets))
    return value.detach(), {name: tensor.detach() for name, tensor in after.items()}


def with_gradients(step: TorchStep) -> dict[str, Tensor]:
    """Run the forward pass as `forward`; return the loss, buffers and gradients, by names for comparisons alone."""
    state = {name: tensor.detach().clone() for name, tensor in step.state.items()}
    for name in step.trainable:
        state[name].requires_grad_()
    inputs, targets = ([tensor.detach().clone() for tensor in tensors] for tensors in (step.inputs, step.targets))
    with lengths_as_tensors():
        value, after, _ = step.apply(state, inputs, targets)
    leaves = [state[name] for name in step.trainable]
    gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    named = zip(step.trainable, gradients, strict=True)
    return {"loss": value.detach(), **after, **{f"{name} gradient": one for name, one in named}}


def are_close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal but for roundings."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    largest = float(torch.nan_to_num(a.detach()).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=_ROUNDINGS * torch.finfo(a.dtype).eps * largest, equal_nan=True)
