"""Polynomials up to the names of the tensors that they read, so that the equal layers of a network are read once.

Two polynomials have one *pattern* if they differ by nothing but these names. What an operation makes of polynomials
does not depend on names: what it made of some is, renamed, what it makes of others with the same patterns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradfuse.passes.algebra.algebra import Algebra, Atom, Monomial, Poly


class Reordered(Exception):
    """With the new names another term leads a polynomial, and the algebra would scale it in another way."""


class Renaming:
    """Polynomials as they are with other tensors in the place of those that they read."""

    def __init__(self, algebra: Algebra, names: Mapping[object, object]) -> None:
        self._algebra = algebra
        self._names = names
        self._atoms: dict[int, int] = {}

    def poly(self, poly: Poly) -> Poly:
        """The polynomial that reads the other tensors.

        Raises:
            Reordered: the algebra would write it in another way.
        """
        number, tensors = self._algebra.pattern(poly)
        if not tensors or (new := self._renamed(tensors)) == tensors:
            return poly
        return Poly({self._monomial(m): c for m, c in poly.terms.items()}, (number, new))

    def _renamed(self, tensors: tuple[object, ...]) -> tuple[object, ...]:
        return tuple([self._names.get(t, t) for t in tensors])

    def _monomial(self, monomial: Monomial) -> Monomial:
        atoms = self._atoms
        factors = [(known if (known := atoms.get(a)) is not None else self._atom(a), e) for a, e in monomial]
        factors.sort()
        return tuple(factors)

    def _atom(self, a: int) -> int:
        number, tensors = self._algebra.pattern_of_atom(a)
        if not tensors or (new := self._renamed(tensors)) == tensors:
            found = a
        else:
            known = self._algebra.atom_of_pattern((number, new))
            found = self._made(self._algebra.atoms[a], (number, new)) if known is None else known
        self._atoms[a] = found
        return found

    def _made(self, atom: Atom, pattern: tuple[int, tuple[object, ...]]) -> int:
        args: tuple[Any, ...]
        match atom.kind:
            case "tensor":
                args = (*self._renamed(atom.args[:1]), *map(self.poly, atom.args[1:]))
            case "sum":
                args = (tuple(map(self.poly, atom.args[0])), self._monomial(atom.args[1]))
            case "exp":
                args = (self._monomial(atom.args[0]),)
            case _:
                args = tuple(map(self.poly, atom.args))
        if atom.kind in ("pow", "eq") and _ends(*args) != _ends(*atom.args):
            raise Reordered
        return self._algebra.intern_renamed(atom, args, pattern)


def _ends(poly: Poly) -> tuple[float, float]:
    """The coefficients by which the algebra scales what it takes a power of, or compares with zero."""
    return poly.terms[min(poly.terms)], poly.terms[max(poly.terms)]
