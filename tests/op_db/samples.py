"""Samples of PyTorch's operators as modules with a loss: what `torch.testing` checks its own gradients with.

An `OpInfo` of `op_db` is an operator and what makes arguments for it. The tensors of a sample that require a gradient
become parameters, those that the operator writes into become buffers, and all others are inputs. The loss is the sum of
the outputs times fixed random numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

SAMPLES = 8
"""How many samples of an operator are taken at most."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A module, its inputs, and what the elements of its outputs are multiplied with in the loss."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]


class Call(nn.Module):
    """Calls an operator, and gives what it returns as a flat list of real tensors."""

    def __init__(self, op: Any, sample: Any, changed: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.differentiable: list[int] | None = None
        self.op, self.process = op, sample.output_process_fn_grad
        leaves, self.structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.names: dict[int, str] = {}
        self.places: dict[int, int] = {}
        self.inputs: list[Tensor] = []
        tensors: dict[int, int] = {}
        self.leaves = list(leaves)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            first = tensors.setdefault(id(leaf), place)
            self.leaves[place] = None
            if first != place:
                self._share(first, place)
            elif leaf.requires_grad and leaf.is_floating_point():
                self.names[place] = f"p{place}"
                self.register_parameter(f"p{place}", nn.Parameter(leaf.detach().clone()))
            elif place in changed:
                self.names[place] = f"b{place}"
                self.register_buffer(f"b{place}", leaf.detach().clone())
            else:
                self.places[place] = len(self.inputs)
                self.inputs.append(leaf.detach().clone())

    def _share(self, first: int, place: int) -> None:
        if first in self.names:
            self.names[place] = self.names[first]
        else:
            self.places[place] = self.places[first]

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        leaves = list(self.leaves)
        for place, name in self.names.items():
            leaves[place] = getattr(self, name)
        for place, index in self.places.items():
            leaves[place] = inputs[index]
        argument, args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        result = self.process(self.op.gradcheck_wrapper(self.op.get_op(), argument, *args, **kwargs))
        outputs = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        outputs = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in outputs]
        if self.differentiable is None:
            self.differentiable = [k for k, one in enumerate(outputs) if one.is_floating_point() and one.requires_grad]
        return [outputs[k] for k in self.differentiable]

    def written(self) -> frozenset[int]:
        """Return the places of the inputs that a call writes into."""
        inputs = [one.clone() for one in self.inputs]
        self(*inputs)
        pairs = list(zip(inputs, self.inputs, strict=True))
        written = {index for index, (after, before) in enumerate(pairs) if not _equal(after, before)}
        return frozenset(place for place, index in self.places.items() if index in written)


def loss(outputs: list[Tensor], *weights: Tensor) -> Tensor:
    """Return the sum of all elements, each times its weight."""
    return torch.stack([(one * weight).sum() for one, weight in zip(outputs, weights, strict=True)]).sum()


def operators() -> dict[str, Any]:
    """Return the operators with gradients of float32 on the CPU, by name."""
    found = {}
    every: list[Any] = op_db
    for op in every:
        types: set[torch.dtype] = op.supported_dtypes("cpu")
        if op.supports_autograd and torch.float32 in types:
            found[op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")] = op
    return found


def samples_of(op: Any) -> Iterator[Sample]:
    """Return the first samples of an operator that differ in shapes, types or other arguments.

    Those with a tensor without elements come last. What PyTorch itself refuses, or gives no gradient for, is no sample.
    """
    seen = set()
    torch.manual_seed(0)
    every = sorted(op.sample_inputs("cpu", torch.float32, requires_grad=True), key=_is_empty)

    def distinct() -> Iterator[Any]:
        for sample in every:
            key = repr([_kind(leaf) for leaf in pytree.tree_leaves((sample.input, sample.args, sample.kwargs))])
            if key not in seen:
                seen.add(key)
                yield sample

    for number, sample in enumerate(itertools.islice(_made(op, distinct()), SAMPLES)):
        torch.manual_seed(number)
        yield sample


def _made(op: Any, samples: Iterator[Any]) -> Iterator[Sample]:
    for sample in samples:
        try:
            call = Call(op, sample)
            changed = call.written()
            call = Call(op, sample, changed) if changed else call
            outputs = call(*(one.clone() for one in call.inputs))
            if not outputs:
                continue
            generator = torch.Generator().manual_seed(0)
            weights = tuple(torch.randn(one.shape, generator=generator) for one in outputs)
            loss(outputs, *weights).backward()  # type: ignore[no-untyped-call]
        except Exception:
            # PyTorch's own refusal, of whatever kind.
            continue
        call.zero_grad()
        if changed:
            call = Call(op, sample, changed)
        yield Sample(call, tuple(call.inputs), weights)


def _is_empty(sample: Any) -> bool:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(isinstance(leaf, Tensor) and leaf.numel() == 0 for leaf in leaves)


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__, repr(leaf)
    return tuple(leaf.shape), leaf.dtype, leaf.layout, leaf.requires_grad


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.layout != torch.strided:
        return True
    return bool(
        torch.equal(
            one.nan_to_num() if one.is_floating_point() else one,
            other.nan_to_num() if other.is_floating_point() else other,
        )
    )
