"""The operations that need each other, as the modules that implement them see them.

A product of conditions substitutes, a substitution makes sums, a sum multiplies. Their rules lie in modules of their
own, as functions whose first argument is an :class:`Operations`: they call each other through it, and import only what
stands below them. class Algebra puts them together.

Invariant: operands are in normal form, and so is every result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from gradfuse.passes.algebra.atoms import Atoms
from gradfuse.passes.algebra.patterns import Patterns
from gradfuse.passes.algebra.polynomials import Exponent, Poly


class Operations(Atoms, ABC):
    """A table of atoms with the operations on polynomials over them.

    Each raises TooComplex for a result that has no normal form within the limits.

    Attributes:
        patterns: the patterns of these polynomials.
        opened_sums: what `opened` gave, by sum atom and variables.
        substituted: what substitutions gave, by atom and what was put in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patterns = Patterns(self)
        self.opened_sums: dict[tuple[int, ...], Poly] = {}
        self.substituted: dict[tuple[int, tuple[tuple[int, Poly], ...]], Poly] = {}

    @abstractmethod
    def mul(self, a: Poly, b: Poly) -> Poly: ...

    @abstractmethod
    def product(self, polys: Iterable[Poly]) -> Poly: ...

    @abstractmethod
    def power(self, poly: Poly, exponent: Exponent) -> Poly: ...

    @abstractmethod
    def exp(self, poly: Poly) -> Poly: ...

    @abstractmethod
    def log(self, poly: Poly) -> Poly: ...

    @abstractmethod
    def equal_zero(self, poly: Poly) -> Poly: ...

    @abstractmethod
    def less_than_zero(self, poly: Poly) -> Poly: ...

    @abstractmethod
    def inside(self, index: Poly, size: Poly) -> Poly: ...

    @abstractmethod
    def tensor(self, name: object, indices: Iterable[Poly], boolean: bool = False, integer: bool = False) -> Poly: ...

    @abstractmethod
    def sum(self, poly: Poly, variables: Mapping[int, Poly], valid: Mapping[int, Poly] | None = None) -> Poly: ...

    @abstractmethod
    def substitute(self, poly: Poly, names: Mapping[int, Poly]) -> Poly: ...
