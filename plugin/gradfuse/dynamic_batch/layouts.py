"""Where the batch is in a value."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable

from gradfuse.models.propagation import Size


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of sizes: a number, and the names that it is multiplied by, sorted."""

    number: int = 1
    names: tuple[str, ...] = ()

    @staticmethod
    def of(sizes: Iterable[Size]) -> Product:
        sizes = list(sizes)
        numbers = [size for size in sizes if isinstance(size, int)]
        return Product(math.prod(numbers), tuple(sorted(size for size in sizes if isinstance(size, str))))

    def __mul__(self, other: Product) -> Product:
        return Product(self.number * other.number, tuple(sorted(self.names + other.names)))

    def over(self, other: Product) -> Product | None:
        """Return the quotient; None where it is no product of sizes."""
        names = Counter(self.names)
        names.subtract(other.names)
        if other.number == 0 or self.number % other.number or min(names.values(), default=0) < 0:
            return None
        return Product(self.number // other.number, tuple(sorted(names.elements())))


ONE = Product()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the batch is in a value.

    Attributes:
        axis: the axis that it is in.
        before: how many numbers of that axis differ in what is outside of the batch, as the steps where a sequence of
            batches has become rows.
        after: those in what is inside of it, as the heads where (batch, heads) has become one axis.
    """

    axis: int
    before: Product = ONE
    after: Product = ONE

    @property
    def plain(self) -> bool:
        """Whether the axis is the batch alone."""
        return self.before == self.after == ONE

    @property
    def per_row(self) -> Product:
        """How many numbers of the axis a row of the batch has."""
        return self.before * self.after

    def size(self, batch: int) -> Product:
        """Return the size of the axis for a batch."""
        return self.per_row * Product(batch)

    def at(self, axis: int) -> Layout:
        """Return the same at another axis."""
        return dataclasses.replace(self, axis=axis)


@dataclasses.dataclass(frozen=True)
class Multiple:
    """An integer in a graph that is a multiple of the batch."""

    factor: Product = ONE

    def size(self, batch: int) -> int | None:
        """Return it for a batch; None where it is multiplied by a size that is not known."""
        return None if self.factor.names else self.factor.number * batch
