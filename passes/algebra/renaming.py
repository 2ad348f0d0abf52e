"""Polynomials with other tensors in the place of those that they read.

Renaming rebuilds no sum and multiplies nothing: it makes atoms of the same pattern. Invariant: a renamed polynomial is
what the operations would have made of the renamed operands, or :class:`Reordered` is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradfuse.passes.algebra.atoms import Atom
from gradfuse.passes.algebra.operations import Operations
from gradfuse.passes.algebra.polynomials import Monomial, Pattern, Poly


class Reordered(Exception):
    """With the new names another term leads a polynomial, so the algebra would scale it in another way."""


class Renaming:
    """Other names for tensors; tensors that have none keep their own."""

    def __init__(self, algebra: Operations, names: Mapping[object, object]) -> None:
        self._algebra = algebra
        self._names = names
        self._atoms: dict[int, int] = {}

    def poly(self, poly: Poly) -> Poly:
        """The polynomial that reads the other tensors.

        Raises:
            Reordered: the algebra would write it in another way.
        """
        number, tensors = self._algebra.patterns.of(poly)
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
        number, tensors = self._algebra.patterns.of_atom(a)
        if not tensors or (new := self._renamed(tensors)) == tensors:
            found = a
        else:
            known = self._algebra.patterns.atom_of((number, new))
            found = self._made(self._algebra.atoms[a], (number, new)) if known is None else known
        self._atoms[a] = found
        return found

    def _made(self, atom: Atom, pattern: Pattern) -> int:
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
        found = self._algebra.intern_renamed(atom, args, pattern[1])
        self._algebra.patterns.note(found.id, pattern)
        return found.id


def _ends(poly: Poly) -> tuple[float, float]:
    """The coefficients by which the algebra scales what it takes a power of, or compares with zero."""
    return poly.terms[min(poly.terms)], poly.terms[max(poly.terms)]
