"""Tensors that share memory, of which a step changes one: in a model each has memory of its own.

This module imports torch.
"""

from __future__ import annotations

import bisect
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.export import explaining
from gradfuse.export.leaves import ABOUT
from gradfuse.export.reporting import refusal
from gradfuse.export.torch_step import Outcome, TorchStep

_MOST_ELEMENTS = 1 << 24
"""Of tensors whose places in memory lie among each other, and are more, none is taken for free of the other."""


def refuse_shared(step: TorchStep, native: Outcome) -> None:
    """Refuse a step whose parameters and buffers share memory, if it changes or trains what is there.

    One tensor under several names is no other tensor.

    Raises:
        ExportError: two of them do, or several elements of one.
    """
    live, names = {*step.trainable, *native.changed, *step.frozen_inputs}, list(step.state)
    spans = sorted((*_span(one), place) for place, one in enumerate(step.state.values()) if _has_memory(one))
    for name in names:
        if name in live and _has_memory(step.state[name]) and _overlaps_itself(step.state[name]):
            raise refusal(
                f"several elements of {name!r} have one place in memory, which {_what(step, name)}; expected a tensor "
                "with memory of its own for each, as expand(...).clone() gives"
            )
    reached: list[tuple[int, int]] = []
    for start, end, place in spans:
        reached = [(until, other) for until, other in reached if until > start]
        for _, other in reached:
            pair = [names[one] for one in sorted((place, other))]
            second, first = pair if pair[0] in live else reversed(pair)
            if second in live and _overlap(step.state[first], step.state[second]):
                raise refusal(
                    f"{first!r} shares memory with {second!r}, which {_what(step, second)}; expected "
                    f"{_advice(step, first)}"
                )
        reached.append((end, place))


class Aliases(TorchFunctionMode):
    """Notes where code reads the memory of a step's own tensors, in whose place a run has put copies.

    It gets there by an attribute that is no buffer, a list of parameters, or the like.
    """

    def __init__(self, step: TorchStep) -> None:
        super().__init__()
        self._tensors = {name: one for name, one in step.state.items() if _has_memory(one)}
        self._spans = sorted((*_span(one), name) for name, one in self._tensors.items())
        self._starts = [start for start, _, _ in self._spans]
        self._reached = list(itertools.accumulate((end for _, end, _ in self._spans), max))
        self._found: dict[str, str] = {}

    def refuse(self, step: TorchStep, native: Outcome) -> None:
        """Refuse a step that reads what it changes or trains in this way.

        Raises:
            ExportError: it does.
        """
        for tensor, hook in native.read_by_hooks:
            self._note(tensor, str(hook))
        for name in (*step.trainable, *native.changed, *step.frozen_inputs):
            if name in self._found:
                raise refusal(
                    f"the step reads the memory of {name!r}, which {_what(step, name)}, by another tensor, in "
                    f"{self._found[name]}; expected the module's own attribute there, or a copy"
                )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in ABOUT and (name != "__get__" or isinstance(result, Tensor)):
            for one in private.tensors_in((args, kwargs)):
                if isinstance(one, Tensor) and _has_memory(one):
                    self._note(one, None)
        return result

    def _note(self, tensor: Tensor, reader: str | None) -> None:
        """Note whose memory a tensor has, and what reads it; None: the code that runs."""
        start, end = _span(tensor)
        place = bisect.bisect_left(self._starts, end) - 1
        while place >= 0 and self._reached[place] > start:
            _, until, name = self._spans[place]
            place -= 1
            if until > start and name not in self._found and _overlap(tensor, self._tensors[name]):
                where = reader or explaining.current_place()
                if where is not None:
                    self._found[name] = where


def _what(step: TorchStep, name: str) -> str:
    if name in step.frozen_inputs:
        return "is an input by frozen_inputs"
    return "is trained" if name in step.trainable else "the step changes"


def _advice(step: TorchStep, name: str) -> str:
    if name in step.buffers:
        return f"a copy, as {name!r} made by detach().clone(), or the other one in its place in forward"
    return "one and the same Parameter under both names, or copies"


def _has_memory(tensor: Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_meta and not private.is_wrapped(tensor)
    return plain and not private.is_made_of_others(tensor) and tensor.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses at which the memory of a tensor begins and ends."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    return start, start + extent * tensor.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have an element in common."""
    (start, end), (other, until) = _span(a), _span(b)
    if a.device != b.device or start >= until or other >= end:
        return False
    width = a.element_size()
    dense = all(until - start == one.numel() * width for one, start, until in ((a, start, end), (b, other, until)))
    if dense or width != b.element_size() or (start - other) % width or a.numel() + b.numel() > _MOST_ELEMENTS:
        return True
    first = min(start, other)
    places = [_places(one, (begin - first) // width) for one, begin in ((a, start), (b, other))]
    return bool(torch.isin(*places).any())


def _places(tensor: Tensor, offset: int) -> Tensor:
    """Return where the elements of a tensor are, counted in elements."""
    places = torch.tensor([offset])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + stride * torch.arange(size)).reshape(-1)
    return places


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether several elements of a tensor have one place in memory."""
    pairs = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach = 0
    for stride, size in pairs:
        if stride <= reach:
            return tensor.numel() > _MOST_ELEMENTS or len({*_places(tensor, 0).tolist()}) < tensor.numel()
        reach += stride * (size - 1)
    return False
