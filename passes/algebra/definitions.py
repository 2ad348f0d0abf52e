"""Names that say what they stand for: sizes that a graph computes, and the positions that NonZero finds.

Both are immutable and compare by content, so the same definition is the same dimension or tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradfuse.passes.algebra.polynomials import Poly


class DerivedSize(NamedTuple):
    """The size of a dimension that the graph computes from other sizes.

    `kind` is "broadcast" for the common size of several that are equal where they are not 1, or "slice" for the number
    of elements from `start` to `stop` by `step`, as Python counts them, in a dimension of one size.
    """

    kind: str
    sizes: tuple[Poly, ...]
    start: int = 0
    stop: int = 0
    step: int = 1

    def of(self, sizes: Sequence[int]) -> int:
        """The size, given the numbers that `sizes` are in one run of the graph."""
        if self.kind == "slice":
            return len(range(sizes[0])[self.start : self.stop : self.step])
        return 0 if 0 in sizes else max(sizes)


class Positions(NamedTuple):
    """The name of the tensor of the positions, in order, at which a condition holds, as NonZero returns them.

    `condition` is a polynomial in variable 0, which runs from 0 to below `size`. It holds `times` times.
    """

    condition: Poly
    size: Poly
    times: Poly

    def __str__(self) -> str:
        return "positions"
