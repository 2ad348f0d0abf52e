"""Random numbers that modules draw by Python's `random` or by numpy, as seeded draws of PyTorch.

Single numbers, as `random.random()` and `np.random.uniform(0, 1)` give, become draws by `torch.rand`: numbers where
PyTorch runs a module, tensors where it is traced. So does the mask of SpecAugment, which transformers' speech models
draw by numpy, in `_compute_mask_indices`. This module imports torch.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse.export import explaining

_REPLACED = "replaced_by_gradfuse"
_SPANS = "_compute_mask_indices"
_ARGUMENTS_OF_SPANS = ("shape", "mask_prob", "mask_length", "attention_mask", "min_masks")
_DRAWN = ((random, "random"), (random, "uniform"), (np.random, "random"), (np.random, "rand"), (np.random, "uniform"))
_as_tensors: contextvars.ContextVar[bool] = contextvars.ContextVar("as_tensors", default=False)


@contextlib.contextmanager
def as_numbers() -> Iterator[None]:
    """Let code draw numbers and masks as without it, but by `torch.rand`."""
    if _as_tensors.get():
        yield
        return
    with _replaced(float, _drawn_by_numpy):
        yield


@contextlib.contextmanager
def as_tensors() -> Iterator[None]:
    """Let what code draws be tensors, also where `as_numbers` is asked for within."""
    token = _as_tensors.set(True)
    try:
        with _replaced(Tensor.double, _drawn_by_torch), _TensorsOfTensors():
            yield
    finally:
        _as_tensors.reset(token)


def states() -> tuple[Any, Any]:
    """Return what changes when numbers are drawn that are not replaced: by Python, and by numpy."""
    _, keys, position, *normal = np.random.get_state(legacy=True)
    return random.getstate(), (np.asarray(keys).tobytes(), int(position), *normal)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """At the end, put back the state of the process's own generators of numpy and Python."""
    by_numpy, by_python = np.random.get_state(legacy=True), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(by_numpy)
        random.setstate(by_python)


@contextlib.contextmanager
def _replaced(
    number: Callable[[Tensor], Any], spans: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    changed: list[tuple[Any, str, Any]] = []
    for module, name in _DRAWN:
        changed.append((module, name, getattr(module, name)))
        setattr(module, name, _drawing(getattr(module, name), number))
    # There are thousands of modules.
    for module in [module for module in list(sys.modules.values()) if _SPANS in getattr(module, "__dict__", ())]:
        original = getattr(module, _SPANS)
        # Contexts may be nested.
        original = getattr(original, _REPLACED, original)
        if isinstance(original, FunctionType) and tuple(inspect.signature(original).parameters) == _ARGUMENTS_OF_SPANS:
            changed.append((module, _SPANS, getattr(module, _SPANS)))
            replacement = spans(original)
            vars(replacement)[_REPLACED] = original
            setattr(module, _SPANS, replacement)
    try:
        yield
    finally:
        for module, name, original in reversed(changed):
            setattr(module, name, original)


def _drawing(original: Callable[..., Any], number: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """Return a function that draws single numbers of `original`'s bounds by PyTorch for the code of users."""

    def draw(*bounds: Any, **named: Any) -> Any:
        given = (*bounds, *named.values())
        is_range = original.__name__ == "uniform" and len(given) == len(_UNIT) and tuple(named) in _NAMED
        known = not given or is_range
        frame = inspect.currentframe()
        caller = "" if frame is None or frame.f_back is None else frame.f_back.f_code.co_filename
        if not (known and all(isinstance(one, (int, float)) for one in given) and explaining.is_users(caller)):
            return original(*bounds, **named)
        low, high = given or _UNIT
        return low + (high - low) * number(torch.rand([]))

    draw.__name__ = original.__name__
    return draw


_UNIT = (0.0, 1.0)
_NAMED = ((), ("high",), ("b",), ("low", "high"), ("a", "b"))
"""Which bounds may be given by name."""


def _drawn_by_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original` with seeded answers of numpy, which choose the same spans as `_masked`."""

    def spans(
        shape: tuple[int, int], mask_prob: float, mask_length: int, attention_mask: Any = None, min_masks: int = 0
    ) -> npt.NDArray[np.bool_]:
        share, scores = torch.rand([]), torch.rand(shape)
        rows = iter(scores)

        def choice(places: Any, count: int, *, replace: bool) -> Any:
            return places[next(rows)[: len(places)].sort(stable=True)[1][:count].numpy()]

        with _attribute(np.random, "rand", lambda count: share.double().reshape(count).numpy()):
            with _attribute(np.random, "choice", choice):
                found: npt.NDArray[np.bool_] = original(shape, mask_prob, mask_length, attention_mask, min_masks)
        wanted = _masked(share, scores, mask_prob, mask_length, attention_mask, min_masks)
        if not np.array_equal(found, wanted.numpy()):
            raise ValueError(f"{_SPANS} masks other places than that of transformers")
        return found

    return spans


def _drawn_by_torch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gives the same as a tensor, with dynamic sizes as well."""

    def spans(
        shape: tuple[int, int], mask_prob: float, mask_length: int, attention_mask: Any = None, min_masks: int = 0
    ) -> Tensor:
        return _masked(torch.rand([]), torch.rand(shape), mask_prob, mask_length, attention_mask, min_masks)

    return spans


def _masked(
    share: Tensor, scores: Tensor, mask_prob: float, mask_length: int, attention_mask: Tensor | None, min_masks: int
) -> Tensor:
    """Return which elements of rows of a length are masked, by spans that begin where the lowest scores are.

    Args:
        share: the chance to round a number of spans down, ().
        scores: random numbers of [0, 1), (rows, length).
        mask_prob: the share of the elements that spans have in all.
        mask_length: the length of a span.
        attention_mask: (rows, length), with as many ones in a row as elements may be masked; None: all may be.
        min_masks: the least number of spans.
    """
    every = torch.ones_like(scores, dtype=torch.int64)
    lengths = every.sum(-1, keepdim=True)
    within = lengths if attention_mask is None else attention_mask.detach().sum(-1, keepdim=True).to(torch.int64)
    places = every.cumsum(-1) - 1

    def count(size: Tensor) -> Tensor:
        spans = (mask_prob * size.double() / mask_length + share.double()).floor().to(torch.int64).clamp(min=min_masks)
        spans = torch.where(spans * mask_length > lengths, lengths // mask_length, spans)
        starts = size - (mask_length - 1)
        return torch.where(starts < spans, starts.clamp(min=0), spans)

    spans = count(within)
    allowed = torch.where(places < within - (mask_length - 1), scores, 2.0)
    ranks = allowed.sort(stable=True)[1].sort(stable=True)[1]
    begun = (ranks < spans).to(torch.int64).cumsum(-1)
    ended = F.pad(begun, (mask_length, 0))[:, : begun.shape[1]]
    # As transformers do for items that are shorter than a span.
    last = (spans == 0) & (count(lengths) > 0) & (places == lengths - 1)
    return (begun > ended) | last


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _TensorsOfTensors(TorchFunctionMode):
    """`torch.tensor` of a tensor is that tensor in another type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and isinstance(args[0], Tensor):
            return args[0].to(kwargs.get("device"), kwargs.get("dtype"))
        return func(*args, **kwargs)
