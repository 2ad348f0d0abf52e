"""The numbers that a subgraph and the fused op are run on, chosen to tell them apart.

A sample has a *style*, one for all floats of a run: normal, peaked (large numbers), sparse (zeros), positive, uniform
(all the same), not finite (NaN and infinity in one leaf), or near a constant of the graph. Integers and masks go by
the style as well: integers are what the operator says that its inputs hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.custom_ops.operator import NOTHING_IGNORED, Classes, Ends
from gradfuse.passes.proving.region import Region
from gradfuse.passes.proving.shrinking import KEPT_SIZE, Table
from gradfuse.passes.reading import FLOATS, attribute

Array = npt.NDArray[Any]

MOVES = 64
"""Times the change that small moves of numbers make is taken for rounding."""
_WOBBLE = 2.0**-40  # relative change of numbers that shows what rounding does
_REPLACEMENTS = ((-1.5, 2.25), (2.5, -0.75), (math.nan, 300.0))  # for NaN and infinity; the last is a limit
_DIMS = ((3, 5, 2, 4, 7, 6), (2, 3, 4, 2, 5, 3))
_MOST_COUNTED = 40  # of what counts something
_VARIED = 6  # symbols that are given sizes one by one
_NEAR = 4  # constants near which numbers are chosen, on both sides of 0 and at the inverse
_LARGEST = {
    ir.DataType.FLOAT16: 65504.0,
    ir.DataType.BFLOAT16: 3.38e38,
    ir.DataType.FLOAT: 3.4e38,
    ir.DataType.DOUBLE: 1.7e308,
}


@dataclass(frozen=True)
class Sample:
    """One run: the sizes of symbolic dimensions in order of appearance, and how leaves are filled."""

    sizes: tuple[int, ...]
    style: str
    seed: int

    @property
    def is_near(self) -> bool:
        """Whether the numbers are near a constant of the graph."""
        return self.style.startswith("near")

    @property
    def is_empty(self) -> bool:
        """Whether a symbolic dimension has size 0."""
        return 0 in self.sizes


class Samples:
    """The samples of a region and the numbers that they stand for."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def elements(self, table: Table) -> int:
        """Return how many elements the leaves have in the first sample, with these static sizes replaced."""
        region = self.region
        env = dict(zip(region.dims, self._base(_DIMS[0]), strict=True))
        return sum(math.prod(region.size(s, env, table) for s in region.extents(v)) for v in region.leaves)

    def of(self, constants: Iterable[Array]) -> Iterator[Sample]:
        """Yield the samples of the region with these values of its constants."""
        count = len(self.region.dims)
        base, other = (self._base(d) for d in _DIMS)
        # Of targets there may be no more than rows, whichever symbol comes first.
        bases = list(dict.fromkeys((base, tuple(sorted(base, reverse=True)), (_DIMS[0][0],) * count)))
        if self.region.rewrite.linear or self.region.rewrite.independent:
            yield from (Sample(sizes, "normal", seed) for seed, sizes in enumerate((*bases, other)))
            yield from (Sample((n,) * count, "normal", 30 + n) for n in (1, 2) if count)
            return
        for sizes in bases:
            for seed, style in enumerate(("normal", "peaked", "sparse", "positive", "uniform")):
                yield Sample(sizes, style, seed)
        floats = [k for k, v in enumerate(self.region.leaves) if v.dtype in FLOATS]
        for k in () if self.region.rewrite.skips else floats[:4]:
            yield from (Sample(s, f"not finite {k} once", 10 + k) for s in bases)
            yield from (Sample(s, f"not finite {k} often", 14 + k + n) for n in (0, 100) for s in (bases[0], bases[-1]))
        if any(v.dtype not in FLOATS for v in self.region.leaves):
            styles = enumerate(("all true", "all false"))
            yield from (Sample(s, style, 20 + k) for k, style in styles for s in bases)
        yield from (
            Sample(s, f"near {x!r}", 60 + k)
            for k, x in enumerate(_places(constants, self.region.rewrite.within))
            for s in {*bases[:1], *bases[-1:]}
        )
        if count:
            yield Sample(other, "normal", 30)
            yield from (Sample((n,) * count, "normal", 30 + n) for n in (1, 2))
            for k in range(min(count, _VARIED)):
                yield from (Sample((*s[:k], 1, *s[k + 1 :]), "normal", 40 + k) for s in bases)
                yield Sample((*base[:k], 2, *base[k + 1 :]), "normal", 46 + k)
                yield Sample((*(1,) * k, base[k], *(1,) * (count - k - 1)), "normal", 52 + k)
            yield from (Sample((*base[:k], 0, *base[k + 1 :]), "normal", 80 + k) for k in range(min(count, 3)))

    def sizes(self) -> list[tuple[int, ...]]:
        """Return the sizes of the symbols in all samples."""
        return list(dict.fromkeys(sample.sizes for sample in self.of(self.region.constants.values())))

    def feeds(self, sample: Sample, table: Table) -> dict[str, Array]:
        """Return the values of leaves and shapes by name."""
        region = self.region
        env = dict(zip(region.dims, sample.sizes, strict=True))
        rng = np.random.default_rng(sample.seed)
        feeds: dict[str, Array] = {}
        arrays: list[Array] = []
        for k, value in enumerate(region.leaves):
            same = region.same_as(value)
            if same < k:
                array = arrays[same]
            else:
                shape = [region.size(s, env, table) for s in region.extents(value)]
                array = self._filled(k, value, shape, sample, rng, env, table)
            arrays.append(array)
            feeds[region.names[value]] = array
        for value, vector in region.shapes.items():
            numbers = [region.size(s, env, table) for s in vector]
            sizes = np.asarray(numbers, np.int32 if value.dtype == ir.DataType.INT32 else np.int64)
            scalar = value.shape is not None and len(value.shape) == 0
            feeds[region.names[value]] = sizes.reshape(()) if scalar else sizes
        return feeds

    def _base(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """A size for each symbol: the same for those that meet in an elementwise operation, else another one."""
        dims, algebra = self.region.dims, self.region.site.algebra
        firsts = list(range(len(dims)))
        for names in algebra.met:
            met = [k for k, dim in enumerate(dims) if dim in names]
            joined = {firsts[k] for k in met}
            firsts = [min(joined) if f in joined else f for f in firsts]
        return tuple(sizes[f % len(sizes)] for f in firsts)

    def _filled(
        self,
        k: int,
        value: ir.Value,
        shape: Sequence[int],
        sample: Sample,
        rng: np.random.Generator,
        env: Mapping[str, int],
        table: Table,
    ) -> Array:
        assert value.dtype is not None
        if value in self.region.rewrite.counts:
            dtype = np.dtype(np.float64 if value.dtype in FLOATS else value.dtype.numpy())
            return rng.integers(0, _MOST_COUNTED, shape).astype(dtype)
        if value.dtype == ir.DataType.BOOL:
            if sample.style in ("all true", "all false"):
                return np.full(shape, sample.style == "all true")
            return rng.random(shape) < 0.5
        if value in self.region.rewrite.positive:
            return np.abs(rng.standard_normal(shape)) + 0.1
        if value.dtype in FLOATS:
            return _floats(shape, sample.style, rng, k, _LARGEST[value.dtype])
        dtype = np.dtype(value.dtype.numpy())
        rows = self.region.rewrite.ends.get(value)
        if rows is not None:
            count = self.region.size(rows, env, table)
            ends = np.sort(rng.integers(0, count, shape, endpoint=True))
            ends[..., -1:] = count
            return ends.astype(dtype)
        holds = [i.holds for i in self.region.operator.inputs if i.holds is not None]
        for kind in holds:
            if isinstance(kind, Classes):
                return self._classes(kind, shape, sample, rng, env, table).astype(dtype)
        has_groups = any(isinstance(kind, Ends) for kind in holds)
        return self._compared(dtype, has_groups, shape, sample, rng).astype(dtype)

    def _classes(
        self,
        kind: Classes,
        shape: Sequence[int],
        sample: Sample,
        rng: np.random.Generator,
        env: Mapping[str, int],
        table: Table,
    ) -> Array:
        """Classes, and the number that is ignored where the original tests for it."""
        region = self.region
        names = [i.name for i in region.operator.inputs]
        defaults = {a.name: a.default for a in region.operator.attributes}
        count, ignored = 1, []
        for node in region.rewrite.fused:
            if kind.number:
                count = attribute(node, kind.number, defaults[kind.number])
            else:
                scores = node.inputs[names.index(kind.tensor)]
                assert scores is not None
                count = region.size(region.site.extents(scores)[kind.axis], env, table)
            if kind.ignored:
                ignored.append(attribute(node, kind.ignored, defaults[kind.ignored]))
        # A constant of the graph may happen to be the number that ignores nothing.
        ignored = [n for n in ignored if n != NOTHING_IGNORED]
        picks = [n for n in range(count) if n not in ignored]
        labels = picks + [table.get(n, n) for n in ignored if self._tests(n) or not picks]
        if sample.style in ("all true", "all false"):
            return np.full(shape, labels[-1 if sample.style == "all true" else 0])
        return rng.choice(labels, shape)

    def _compared(
        self, dtype: np.dtype[Any], has_groups: bool, shape: Sequence[int], sample: Sample, rng: np.random.Generator
    ) -> Array:
        """Integers that are compared with others: numbers of groups where the operator has groups, or any."""
        if sample.style == "normal" or sample.style.endswith("once"):
            return rng.integers(0, 2, shape)
        if sample.style == "peaked" or sample.style.endswith("often"):
            return rng.choice([0, 1] if has_groups else self._decisive(dtype), shape)
        if sample.style == "sparse" and has_groups:
            # Counts that add up to nothing, and starts in no order.
            return rng.integers(-KEPT_SIZE, KEPT_SIZE, shape, endpoint=True)
        return np.sort(rng.integers(0, 1 << 20, shape), axis=None).reshape(shape)

    def _decisive(self, dtype: np.dtype[Any]) -> list[int]:
        """Integers for which conditions of the graph may hold, and others for which they may not."""
        limits = np.iinfo(dtype)
        found = {0, 1, *(int(a.flat[0]) for a in self._single_integers())}
        return sorted(n for n in found if limits.min <= n <= limits.max)

    def _tests(self, number: int) -> bool:
        """Whether the original compares with this number."""
        return any(int(a.flat[0]) == number for a in self._single_integers())

    def _single_integers(self) -> list[Array]:
        return [a for a in self.region.constants.values() if a.dtype.kind in "iu" and a.size == 1]


def variants(
    sample: Sample, leaves: Mapping[str, Array], constants: Mapping[str, Array], tolerance: float
) -> list[dict[str, Array]]:
    """Return leaves, and constants, with other numbers: for those that are not finite, or moved as rounding does."""
    if sample.style.startswith("not finite"):
        return [_replaced(leaves, *numbers) for numbers in _REPLACEMENTS]
    if not sample.is_near:
        return []
    rng = np.random.default_rng(sample.seed)
    sizes = [(leaves, _WOBBLE), (constants, tolerance / MOVES)]
    return [
        {
            name: a * (1 + size * rng.choice([-1.0, 1.0], a.shape)) if a.dtype.kind == "f" else a
            for arrays, size in sizes
            for name, a in arrays.items()
        }
    ]


def _replaced(leaves: Mapping[str, Array], nan: float, infinity: float) -> dict[str, Array]:
    """The leaves with numbers in the place of NaNs and infinities."""
    return {
        name: np.nan_to_num(a, nan=nan, posinf=infinity, neginf=-infinity) if a.dtype.kind == "f" else a
        for name, a in leaves.items()
    }


def _floats(shape: Sequence[int], style: str, rng: np.random.Generator, k: int, largest: float) -> Array:
    values = rng.standard_normal(shape)
    match style.split():
        case ["near", place]:
            x = float(place)
            values = np.choose(rng.integers(0, 3, shape), [np.full(shape, x), x + values, x * (1 + values / 2)])
            return np.clip(np.asarray(values, np.float64), -largest, largest)
        case ["peaked"]:
            values *= 30.0
        case ["sparse"]:
            values[rng.random(shape) < 0.5] = 0.0
        case ["positive"]:
            values = np.abs(values) + 0.1
        case ["uniform"]:
            values = np.full(shape, float(values.flat[0]) if values.size else 0.0)
        case ["not", "finite", which, "once"] if int(which) == k and values.size:
            values.flat[rng.integers(values.size)] = np.nan
            values.flat[rng.integers(values.size)] = rng.choice([np.inf, -np.inf])
        case ["not", "finite", which, "often"] if int(which) == k:
            values = np.where(rng.random(shape) < 0.3, rng.choice([np.nan, np.inf, -np.inf], shape), values)
    return np.asarray(values, np.float64)


def _places(constants: Iterable[Array], within: float) -> list[float]:
    """The numbers near which the constants of a graph matter, where those of ordinary size do not reach them.

    None is larger than `within`.
    """
    scalars = {float(a.flat[0]) for a in constants if a.dtype.kind == "f" and a.size and (a == a.flat[0]).all()}
    apart = {abs(c) for c in scalars if math.isfinite(c) and not (c == 0 or 0.1 < abs(c) < 2)}
    chosen = sorted(apart, key=lambda c: abs(math.log(c)), reverse=True)[:_NEAR]
    places = (c if c > 1 else 1 / c for c in chosen)
    return list(dict.fromkeys(x for place in places if place <= within for x in (place, -place)))
