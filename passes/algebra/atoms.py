"""Atoms, the factors of monomials, and the table that numbers them.

Invariant: two atoms of one table have the same number if and only if they have the same kind and arguments. So products
are tuples of numbers, and equal values are equal polynomials.

The table also hands out index variables, which are integers:

- 0, 1, ... are the free variables of a value, in the order of its dimensions;
- -1, -2, ... are bound by sum atoms. Each height of sums within sums has `_SUM_WIDTH` numbers of its own, so equal
  sums are equal atoms and no inner sum captures a variable of an outer one;
- those below, from :meth:`Atoms.fresh`, stand for bound variables while a sum is open. No sum atom has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradfuse.passes.algebra.definitions import DerivedSize, Positions
from gradfuse.passes.algebra.polynomials import Exponent, Monomial, Poly, TooComplex

_DEPTH_LIMIT = 64  # atoms within each other, as in the exponential of an exponential
_SUM_WIDTH = 8  # numbers of variables for each height of sums
_FIRST_FRESH = -1 - (_DEPTH_LIMIT + 1) * _SUM_WIDTH  # a sum is at most as high as it is deep
_ROUNDED_NOWHERE = {"tensor", "eq", "lt", "inside", "wide"}
_NOTHING: frozenset[Any] = frozenset()


class Atom:
    """A factor of monomials: its kind and arguments (see the package's docstring), and what follows from them.

    Attributes:
        poly: the factor alone, as a polynomial.
        free: the variables that it depends on.
        tensors: the tensors that it reads, at any depth.
        height: how many sums stand within each other.
        depth: how many atoms stand within each other.
        indicator: whether it is a condition, worth 0 or 1.
        idempotent: whether it is its own square.
        positive: whether it is known to be above 0.
        ranged: whether an "inside" is in it, at any depth.
    """

    __slots__ = (
        *("args", "depth", "free", "height", "id", "idempotent", "indicator", "kind", "poly", "positive", "ranged"),
        "tensors",
    )

    def __init__(self, id: int, kind: str, args: tuple[Any, ...]) -> None:
        self.id = id
        self.poly = Poly({((id, 1),): 1.0})
        self.kind = kind
        self.args = args
        self.free: frozenset[int] = frozenset()
        self.tensors: frozenset[object] = frozenset()
        self.height = 0
        self.depth = 0
        self.indicator = kind in ("eq", "lt", "inside")
        self.idempotent = self.indicator or kind == "wide"
        self.ranged = kind == "inside"
        self.positive = kind in ("exp", "dim")


class Atoms:
    """The table of atoms of one analysis, and what can be read off polynomials over them.

    Attributes:
        atoms: all atoms, by number.
        equalities: the numbers of those of kind "eq".
        wides: the numbers of those of kind "wide".
        booleans: the tensors whose elements are 0 or 1.
        integers: the tensors whose elements are integers.
        positions: the tensors of positions, numbered as they were met.
        derived: the dimensions that are computed from others, by name.
        bases: the names of the dimensions that the derived ones are computed from in the end.
        long_names: the numbers of definitions that are too long for names.
        met: the names of dimensions that are broadcast to one size, for each set of them.
    """

    def __init__(self) -> None:
        self.atoms: list[Atom] = []
        self.equalities: set[int] = set()
        self.wides: set[int] = set()
        self.booleans: set[object] = set()
        self.integers: set[object] = set()
        self.positions: dict[Positions, int] = {}
        self.derived: dict[str, DerivedSize] = {}
        self.bases: dict[str, frozenset[str]] = {}
        self.long_names: dict[str, int] = {}
        self.met: dict[frozenset[str], None] = {}
        self._table: dict[tuple[Any, ...], int] = {}
        self._variables: dict[int, Poly] = {}

    # The table

    def intern(self, kind: str, *args: Any) -> Atom:
        """The atom of a kind with these arguments.

        Raises:
            TooComplex: too many atoms stand within each other.
        """
        key = _key(kind, args)
        found = self._table.get(key)
        if found is not None:
            return self.atoms[found]
        atom = Atom(len(self.atoms), kind, args)
        inner: Iterable[Monomial] = ()
        if kind == "var":
            atom.free = frozenset(args)
        elif kind in ("exp", "sum"):
            monomial = args[-1]
            atom.free = self.free_of_monomial(monomial)
            inner = (monomial,)
            atom.height = self.height_of(monomial) + (kind == "sum")
            if kind == "sum":
                atom.free = frozenset(v for v in atom.free if v >= 0 or v not in self.bound_of(atom))
                atom.positive = all(self.atoms[a].positive for a, _ in monomial)
        else:
            polys = [a for a in args if isinstance(a, Poly)]
            atom.free = frozenset().union(*(self.free(p) for p in polys))
            inner = [m for p in polys for m in p.terms]
            atom.height = max((self.height_of(m) for m in inner), default=0)
            if kind == "tensor":
                atom.indicator = atom.idempotent = args[0] in self.booleans
                atom.tensors = frozenset(args[:1])
        parts = [self.atoms[a] for a in {a for m in inner for a, _ in m}]
        atom.depth = 1 + max((part.depth for part in parts), default=0)
        if atom.depth > _DEPTH_LIMIT:
            raise TooComplex(f"{atom.depth} functions within each other")
        atom.tensors = atom.tensors.union(*[part.tensors for part in parts])
        atom.ranged = atom.ranged or any(part.ranged for part in parts)
        self._add(key, atom)
        return atom

    def intern_renamed(self, atom: Atom, args: tuple[Any, ...], tensors: Iterable[object]) -> Atom:
        """The atom that differs from another by the names of the tensors only, which are now `tensors`."""
        key = _key(atom.kind, args)
        found = self._table.get(key)
        if found is not None:
            return self.atoms[found]
        new = Atom(len(self.atoms), atom.kind, args)
        new.free, new.height, new.depth = atom.free, atom.height, atom.depth
        new.indicator, new.idempotent = atom.indicator, atom.idempotent
        new.positive, new.ranged = atom.positive, atom.ranged
        new.tensors = frozenset(tensors)
        self._add(key, new)
        return new

    def _add(self, key: tuple[Any, ...], atom: Atom) -> None:
        self.atoms.append(atom)
        self._table[key] = atom.id
        if atom.kind == "eq":
            self.equalities.add(atom.id)
        elif atom.kind == "wide":
            self.wides.add(atom.id)

    def of(self, atom: Atom, exponent: Exponent = 1) -> Poly:
        """A power of an atom as a polynomial."""
        return atom.poly if exponent == 1 else Poly({((atom.id, exponent),): 1.0})

    def var(self, variable: int) -> Poly:
        """An index variable as a polynomial."""
        found = self._variables.get(variable)
        if found is None:
            found = self._variables[variable] = self.of(self.intern("var", variable))
        return found

    def dim(self, name: str) -> Poly:
        """A symbolic dimension as a polynomial."""
        return self.of(self.intern("dim", name))

    # Variables

    def fresh(self, count: int, taken: Iterable[int] = ()) -> tuple[int, ...]:
        """Variables that no sum atom binds and that are not among those `taken`, the highest first.

        The same call gives the same variables again. So ask at once for all that are in use at a time, name those that
        a polynomial brings along in `taken`, and bind them (or put something in their place) before the result leaves.
        """
        first = min(_FIRST_FRESH, min(taken, default=0) - 1)
        return tuple(range(first, first - count, -1))

    def bound_of(self, atom: Atom) -> tuple[int, ...]:
        """The bound variables of a sum atom."""
        return bound_at(atom.height, len(atom.args[0]))

    def free_of_monomial(self, monomial: Monomial) -> frozenset[int]:
        """The variables that a product depends on."""
        atoms = self.atoms
        if len(monomial) == 1:
            return atoms[monomial[0][0]].free
        return _NOTHING.union(*[atoms[a].free for a, _ in monomial])

    def free(self, poly: Poly) -> frozenset[int]:
        """The variables that a polynomial depends on."""
        found = poly._free
        if found is None:
            atoms = self.atoms
            found = poly._free = _NOTHING.union(*[atoms[a].free for m in poly.terms for a, _ in m])
        return found

    def variable_of(self, poly: Poly) -> int | None:
        """The variable that a polynomial is, if it is one alone."""
        if len(poly.terms) != 1:
            return None
        ((m, c),) = poly.terms.items()
        if len(m) != 1 or m[0][1] != 1 or c != 1.0 or self.atoms[m[0][0]].kind != "var":
            return None
        variable: int = self.atoms[m[0][0]].args[0]
        return variable

    def has_variable_factor(self, poly: Poly) -> bool:
        """Whether an index variable is a factor of a term, as a number."""
        return any(self.atoms[a].kind == "var" for m in poly.terms for a, _ in m)

    # What is in a polynomial

    def height_of(self, monomial: Monomial) -> int:
        """How many sums stand within each other in a product."""
        return max((self.atoms[a].height for a, _ in monomial), default=0)

    def tensors(self, poly: Poly) -> frozenset[object]:
        """The tensors that a polynomial reads, at any depth."""
        if poly.pattern is not None:
            return frozenset(poly.pattern[1])
        return _NOTHING.union(*[self.atoms[a].tensors for m in poly.terms for a, _ in m])

    def indicators(self, poly: Poly) -> list[Atom]:
        """The conditions among the factors of a polynomial's terms."""
        return [self.atoms[a] for a in sorted({a for m in poly.terms for a, _ in m}) if self.atoms[a].indicator]

    def first_indicator(self, poly: Poly) -> Atom | None:
        """The first condition among the factors of a polynomial's terms."""
        for monomial in poly.terms:
            for a, _ in monomial:
                if self.atoms[a].indicator:
                    return self.atoms[a]
        return None


def bound_at(height: int, count: int) -> tuple[int, ...]:
    """The variables that a sum of a height binds."""
    first = -1 - (height - 1) * _SUM_WIDTH
    return tuple(range(first, first - count, -1))


def _key(kind: str, args: Iterable[Any]) -> tuple[Any, ...]:
    """What identifies an atom. Conditions and indices compare exactly, as rounding would change what they say."""
    if kind not in _ROUNDED_NOWHERE:
        return (kind, *args)
    return (kind, *[frozenset(a.terms.items()) if isinstance(a, Poly) else a for a in args])
