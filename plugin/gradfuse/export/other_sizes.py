"""Batches of other sizes than the one that a step is exported with, where its axes may vary.

A number that Python computes from a size may become a constant of the traced program. Then the model is right only at
the sizes of the batch, and unrelated sizes reveal it. This module imports torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from gradfuse import _torch_private as private
from gradfuse.export.dynamic_shapes import DynamicShapes
from gradfuse.export.explaining import is_asked_by_code
from gradfuse.export.torch_step import TorchStep

Axis = tuple[str, int]
"""A tensor of the batch, and one of its axes."""

_SMALL = 1 << 16
"""A batch with at most this many numbers may become several times as large; others become smaller where they can."""
_MOST_OF_ONE, _MOST_TRIED = 16, 512
_MOST_DRAWN = 1 << 22
_LEAST = 2
"""PyTorch treats a size of 1 specially."""
_MOVED = 0.1


@dataclasses.dataclass(frozen=True)
class OtherSizes:
    """Sizes that the axes of a batch may have, by what tracing assumed of them.

    Attributes:
        names: the names of the dimensions that vary here.
        sizes: the axis of a tensor -> its size.
        besides: whether they are tried although all of these dimensions have varied before.
        beyond: whether a failure of PyTorch at them means nothing: they are related, or break a condition that torch
            assumed silently, such as one on strides.
    """

    names: tuple[str, ...]
    sizes: Mapping[Axis, int]
    besides: bool = False
    beyond: bool = False

    @classmethod
    def of(
        cls, step: TorchStep, program: ExportedProgram, shapes: DynamicShapes, inputs: Sequence[str]
    ) -> list[OtherSizes]:
        """Return sizes that differ from those of the batch: some of all dimensions at once, then of each alone.

        Args:
            step: the step.
            program: a traced program.
            shapes: the dynamic dimensions.
            inputs: the names of the program's inputs in their order.
        """
        dimensions = _Dimensions.of(step, program, shapes, inputs)
        small = sum(tensor.numel() for tensor in step.batch.values()) <= _SMALL
        found = []
        for grows in (small, not small):
            sizes = dimensions.chosen(dimensions.groups, grows=grows)
            # What is right at two sizes may be wrong at a third; for a small batch, testing that is cheap.
            found += [dataclasses.replace(sizes, besides=small)] if sizes is not None else []
        if len(dimensions.groups) > 1:
            for group, grows in itertools.product(dimensions.groups, (small, not small)):
                sizes = dimensions.chosen([group], grows=grows)
                found += [sizes] if sizes is not None else []
            # Of sizes that are multiples of each other, as of what a model reads and predicts, none varies alone.
            multiples = (dimensions.multiplied(factor) for factor in (3, 2))
            found += [dataclasses.replace(sizes, beyond=True) for sizes in multiples if sizes is not None]
        beyond = dimensions.chosen(dimensions.groups, grows=small, beyond=True)
        return [*found, *([dataclasses.replace(beyond, besides=True, beyond=True)] if beyond is not None else [])]

    def steps(self, step: TorchStep) -> Iterator[TorchStep]:
        """Yield the step with batches of these sizes; later ones for modules that do not take the earlier ones."""
        changes = self._changes(step)
        totals = {size for tensor in step.batch.values() for size in tensor.shape}
        ends = {name for name, tensor in step.batch.items() if _are_ends(tensor, totals)}
        ways = [(ends, False, True), (ends, True, True), (ends, False, False)]
        if ends:  # They may be labels.
            ways.append((set(), False, True))
        for ends, fitted, repeats in ways:
            tensors = {}
            for name, tensor in step.batch.items():
                sizes = {axis: size for (one, axis), size in self.sizes.items() if one == name}
                tensors[name] = _resized(tensor.detach(), sizes, repeats=repeats)
                if tensors[name].numel() and name in ends:
                    tensors[name] = _ending(tensors[name], changes.get(int(tensor[-1]), int(tensor[-1])))
                elif fitted:
                    tensors[name] = _fitted(tensors[name], changes)
            yield dataclasses.replace(
                step,
                inputs=tuple(tensors[name] for name in step.input_names),
                targets=tuple(tensors[name] for name in step.target_names),
            )

    def _changes(self, step: TorchStep) -> dict[int, int]:
        """Return size in the batch -> size here."""
        return {step.batch[name].shape[axis]: size for (name, axis), size in self.sizes.items()}


def _resized(tensor: Tensor, sizes: Mapping[int, int], *, repeats: bool) -> Tensor:
    """Return a tensor of other sizes; what is added repeats what is there, with other fractions.

    It repeats all, or only the last, for example because a text must not get more places for pictures.
    """
    for axis, size in sizes.items():
        before = tensor.shape[axis]
        if not before or size == before:
            continue
        places = torch.arange(size, device=tensor.device)
        given = tensor
        tensor = tensor.index_select(axis, places % before if repeats else places.clamp(max=before - 1))
        descends = _order(given, axis)
        if descends is not None:
            # Ends of bags and of groups, and lengths in their order, stay sorted.
            tensor = tensor.sort(axis, descending=descends).values
        if size > before and tensor.is_floating_point():
            # Because kernels differ in which of several equal numbers they choose. Numbers between 0 and 1 stay there.
            more = tensor.narrow(axis, before, size - before)
            generator = torch.Generator().manual_seed(size)
            moves = 1 - _MOVED * torch.rand(more.shape, generator=generator).to(more)
            more.copy_(torch.where(more == more.round(), more, more * moves))
    return tensor


def _order(tensor: Tensor, axis: int) -> bool | None:
    """Return whether whole numbers descend along an axis; None if they neither ascend nor descend."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return None
    steps = tensor.diff(dim=axis)
    return next((descends for descends in (False, True) if bool((steps <= 0 if descends else steps >= 0).all())), None)


def drawn(step: TorchStep, seed: int) -> TorchStep:
    """Return a step with another batch: fractions near those of its own, whole numbers between the least and largest.

    Whole numbers are different from each other where there are enough.
    """
    generator = torch.Generator().manual_seed(seed)

    def other(tensor: Tensor) -> Tensor:
        if not tensor.numel() or tensor.dtype == torch.bool or tensor.is_complex():
            return tensor
        if tensor.is_floating_point():
            return tensor * (1 - _MOVED * torch.rand(tensor.shape, generator=generator).to(tensor))
        least, count = int(tensor.min()), int(tensor.max()) - int(tensor.min()) + 1
        if tensor.numel() <= count <= _MOST_DRAWN:
            numbers = torch.randperm(count, generator=generator)[: tensor.numel()]
        else:
            numbers = torch.randint(count, (tensor.numel(),), generator=generator)
        return (least + numbers).reshape(tensor.shape).to(tensor)

    return dataclasses.replace(step, inputs=tuple(map(other, step.inputs)), targets=tuple(map(other, step.targets)))


def _fitted(tensor: Tensor, changes: Mapping[int, int]) -> Tensor:
    """Return whole numbers that are right for other sizes, if they are lengths, or parts that add up to one."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or not tensor.numel():
        return tensor
    for before, size in changes.items():
        if int(tensor.max()) == before:
            return torch.where(tensor == before, size, tensor.clamp(max=size))
        missing = size - int(tensor.sum())
        if int(tensor.sum()) == before and tensor.dim() == 1 and int(tensor.max()) + missing >= 0:
            fitted = tensor.clone()
            fitted[int(tensor.argmax())] += missing
            return fitted
    return tensor


def _are_ends(tensor: Tensor, totals: Collection[int]) -> bool:
    """Whether whole numbers go from 0 to the size of an axis, as the ends of bags do."""
    if tensor.dim() != 1 or len(tensor) < _LEAST or _order(tensor, 0) is not False:
        return False
    return int(tensor[0]) == 0 and int(tensor[-1]) in totals


def _ending(ends: Tensor, total: int) -> Tensor:
    """Return ends of which the last one is a total."""
    ends = ends.clamp(max=total)
    ends[-1] = total
    return ends


@dataclasses.dataclass(frozen=True)
class _Dimensions:
    """The sizes of a traced program that may vary.

    Attributes:
        axes: the axis of a tensor -> its size, as an expression of symbols.
        names: the axis of a tensor -> the name of the dimension.
        groups: symbols that vary together, as they have one name.
        given: symbol -> its size in the batch.
        ranges: symbol -> the least and the largest size.
        conditions: what tracing took to be so of the symbols.
        asked: those of them that the user's code asks for.
    """

    axes: dict[Axis, Any]
    names: dict[Axis, str]
    groups: list[tuple[str, ...]]
    given: dict[str, int]
    ranges: dict[str, tuple[int, int]]
    conditions: list[private.SizeCondition]
    asked: list[private.SizeCondition]

    @classmethod
    def of(cls, step: TorchStep, program: ExportedProgram, shapes: DynamicShapes, inputs: Sequence[str]) -> _Dimensions:
        values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
        placeholders = dict(zip(inputs, program.graph_signature.user_inputs, strict=False))
        axes, names = {}, {}
        for name, labels in shapes.names.items():
            for axis, label in labels.items() if name in placeholders else ():
                size = private.expression(values[placeholders[name]].shape[axis])
                if not isinstance(size, int):
                    axes[name, axis], names[name, axis] = size, label
        groups: list[set[str]] = []
        for label in dict.fromkeys(names.values()):
            symbols = {str(one) for key, size in axes.items() if names[key] == label for one in size.free_symbols}
            joined = [group for group in groups if group & symbols]
            groups = [*(group for group in groups if group not in joined), symbols.union(*joined)]
        environment = private.shape_environment(program)
        every = {str(one): one for size in axes.values() for one in size.free_symbols}
        given = {name: private.example_size(environment, one) for name, one in every.items()}
        known = {name: size for name, size in given.items() if size is not None}
        # A step may have been traced with a longer batch.
        for (name, axis), size in axes.items():
            if size.is_Symbol:
                known[str(size)] = step.batch[name].shape[axis]
        conditions = [one for one in private.conditions_on_sizes(program) if one.sources.keys() <= known.keys()]
        return cls(
            axes=axes,
            names=names,
            groups=[tuple(sorted(group)) for group in groups if group and group <= known.keys()],
            given={name: int(size) for name, size in known.items()},
            ranges={name: _range_of(program, one) for name, one in every.items() if name in known},
            conditions=conditions,
            asked=[one for one in conditions if is_asked_by_code(one)],
        )

    def chosen(self, groups: Sequence[tuple[str, ...]], *, grows: bool, beyond: bool = False) -> OtherSizes | None:
        """Return other sizes of some groups of symbols, and the same of the others; None: none was found.

        Args:
            groups: the groups that vary.
            grows: whether larger sizes are tried first.
            beyond: whether what torch asks for itself does not hold for them.
        """
        candidates = []
        conditions = self.asked if beyond else self.conditions
        for group in groups:
            own = [one for one in conditions if one.sources.keys() <= set(group)]
            possible = (
                size
                for size in self._candidates(group, grows=grows)
                if self._is_possible(self.given | self._scaled(group, size), own)
            )
            candidates.append(list(itertools.islice(possible, _MOST_OF_ONE)))
        for sizes in itertools.islice(_by_rank(candidates), _MOST_TRIED):
            values = dict(self.given)
            for group, size in zip(groups, sizes, strict=True):
                values.update(self._scaled(group, size))
            if len(set(sizes)) == len(sizes) and self._is_possible(values, conditions):
                if beyond and self._is_possible(values, self.conditions):
                    continue
                return self._moved(values)
        return None

    def multiplied(self, factor: int) -> OtherSizes | None:
        """Return sizes that are all as many times as large; None where they cannot be so."""
        values = {name: size * factor for name, size in self.given.items()}
        return self._moved(values) if self._is_possible(values, self.conditions) else None

    def _moved(self, values: Mapping[str, int]) -> OtherSizes | None:
        changed = {axis: self._size(axis, values) for axis in self.axes}
        moved = {axis: size for axis, size in changed.items() if size != self._size(axis, self.given)}
        return OtherSizes(tuple(dict.fromkeys(self.names[axis] for axis in moved)), moved) if moved else None

    def _candidates(self, group: tuple[str, ...], *, grows: bool) -> Iterator[int]:
        """Yield sizes of the first symbol of a group, those first that have nothing to do with that in the batch."""
        size = self.given[group[0]]
        others = [*range(2 * size + 1, 5 * size + 8)] if grows else [*range(size * 2 // 3, _LEAST - 1, -1)]
        others += [*range(size + 1, 2 * size + 1)] if grows else [*range(size - 1, size * 2 // 3, -1)]
        yield from sorted(others, key=lambda one: 0 if math.gcd(one, size) == 1 else 1 if one % size else 2)

    def _scaled(self, group: tuple[str, ...], size: int) -> dict[str, int]:
        """Return the sizes of all symbols of a group: as much more as that of the first."""
        first = self.given[group[0]]
        return {
            name: size if self.given[name] == first else max(_LEAST, self.given[name] + size - first) for name in group
        }

    def _is_possible(self, values: Mapping[str, int], conditions: list[private.SizeCondition]) -> bool:
        if not all(least <= values[name] <= most for name, (least, most) in self.ranges.items()):
            return False
        if not all(self._size(axis, values) >= 1 for axis in self.axes):
            return False
        failed = next((one for one in conditions if not _holds(one, values)), None)
        if failed is not None:
            # What one size fails at, the next one does.
            conditions.remove(failed)
            conditions.insert(0, failed)
        return failed is None

    def _size(self, axis: Axis, values: Mapping[str, int]) -> int:
        size = self.axes[axis]
        return int(size.subs({one: values[str(one)] for one in size.free_symbols}))


def _range_of(program: ExportedProgram, symbol: Any) -> tuple[int, int]:
    """Return the least and the largest number that a symbolic size of a traced program may be."""
    found = program.range_constraints.get(symbol)
    if found is None:
        return 0, sys.maxsize
    least, most = found.lower, found.upper
    return (
        int(least) if least.is_Integer and abs(least) < sys.maxsize else 0,
        int(most) if most.is_Integer and abs(most) < sys.maxsize else sys.maxsize,
    )


def _holds(condition: private.SizeCondition, values: Mapping[str, int]) -> bool:
    try:
        return condition.holds(values)
    except TypeError:
        # What cannot be told of numbers is no condition on them.
        return True


def _by_rank(candidates: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield one of each, in the order of the sum of their ranks."""
    most = sum(len(one) for one in candidates)
    for total in range(most):
        yield from _with_sum(candidates, total)


def _with_sum(candidates: Sequence[Sequence[int]], total: int) -> Iterator[tuple[int, ...]]:
    if not candidates:
        if total == 0:
            yield ()
        return
    for rank, one in enumerate(candidates[0][: total + 1]):
        for rest in _with_sum(candidates[1:], total - rank):
            yield (one, *rest)
