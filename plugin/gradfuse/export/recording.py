"""What the operators of a step do, one after the other, to compare runs. This module imports torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export import explaining

_SAMPLES = 64


@dataclasses.dataclass(frozen=True)
class Call:
    """What one operator did.

    Attributes:
        name: the operator.
        numbers: its arguments that are no tensors.
        results: some numbers of each of its results.
        place: where the user's code calls it; None: it does not.
    """

    name: str
    numbers: str
    results: tuple[Tensor, ...]
    place: str | None


class Recorded(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what each operator does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = private.tensors_in((args, kwargs or {}))
        numbers = repr([one for one in leaves if isinstance(one, (int, float, complex, str))])
        results = tuple(_sample(one) for one in private.tensors_in(result) if isinstance(one, Tensor))
        self.calls.append(Call(str(func), numbers, results, explaining.current_place()))
        return result


def _sample(tensor: Tensor) -> Tensor:
    """Return some numbers of a tensor, among them sums in which all of them are."""
    if tensor.layout != torch.strided or tensor.is_complex() or not tensor.numel():
        return torch.zeros(0)
    flat = tensor.detach().reshape(-1).double()
    places = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel())).long()
    return torch.cat([flat[places], flat.mean()[None], flat.abs().mean()[None]])
