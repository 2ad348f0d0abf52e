"""Where code calls torch, and runs of a step's forward pass in which that is observed. This module imports torch."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
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

_FRAGILE = frozenset(
    """
    _embedding_bag _embedding_bag_forward_only _native_batch_norm_legit _native_batch_norm_legit_functional
    _pdist_backward _pdist_forward _segment_reduce_backward linalg_lstsq lu_unpack native_batch_norm segment_reduce
    """.split()
)
"""Those of PyTorch's operators whose kernels, given an empty tensor, may end the process."""
_OF_BAGS, _INCLUDES_LAST = frozenset(("_embedding_bag", "_embedding_bag_forward_only")), 7
"""Those with offsets of bags, and the place of the argument by which the last offset begins no bag."""


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


def position(frame: FrameType) -> tuple[str, int, int]:
    """Return the file, line and column of the call that a frame is in; column 0: Python does not tell."""
    line, column = _position(frame.f_code, frame.f_lasti)
    return frame.f_code.co_filename, line or frame.f_lineno, column or 0


@functools.lru_cache(maxsize=4096)
def _position(code: CodeType, place: int) -> tuple[int | None, int | None]:
    if sys.version_info < (3, 11):
        return None, None
    line, _, column, _ = next(itertools.islice(code.co_positions(), place // 2, None))
    return line, column


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


class Sturdy(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators of PyTorch that may end the process where a tensor is empty, or where there are no bags."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = private.tensors_in((args, kwargs))
        if name in _FRAGILE and any(isinstance(one, Tensor) and not one.numel() for one in tensors):
            raise ValueError(f"{name} of an empty tensor")
        if name in _OF_BAGS and _INCLUDES_LAST < len(args) and args[_INCLUDES_LAST] and args[2].numel() == 1:
            raise ValueError(f"{name} of no bags")
        return func(*args, **(kwargs or {}))
