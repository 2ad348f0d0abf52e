"""Patterns: polynomials without the names of the tensors that they read.

Two polynomials have the same pattern number if they differ by nothing but these names. What an operation makes of
polynomials does not depend on names, so what it made of some, renamed, is what it makes of others with the same
patterns (see renaming.py). That is how the equal layers of a network are read once.

Invariant: the number of a pattern and the names in its places say all about a polynomial, up to the order of its terms.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradfuse.passes.algebra.atoms import Atom, Atoms
from gradfuse.passes.algebra.polynomials import Exponent, Monomial, Pattern, Poly


class Patterns:
    """The patterns of the polynomials and atoms of one table."""

    def __init__(self, atoms: Atoms) -> None:
        self._atoms = atoms
        self._numbers: dict[object, int] = {}
        self._of_atoms: dict[int, Pattern] = {}
        self._atoms_by_pattern: dict[Pattern, int] = {}

    def of(self, poly: Poly) -> Pattern:
        """The pattern of a polynomial."""
        found = poly.pattern
        if found is None:
            places: dict[object, int] = {}
            terms = tuple([(c, *self._placed(m, places)) for m, c in poly.terms.items()])
            found = (self._number(terms), tuple(places))
            # Polynomials that are numbers are shared by all algebras, each of which counts its patterns for itself.
            if poly.constant is None:
                poly.pattern = found
        return found

    def joint(self, polys: Iterable[Poly]) -> tuple[tuple[int, ...], ...]:
        """The patterns of several polynomials, and which of the tensors in them are the same."""
        places: dict[object, int] = {}
        patterns = [self.of(p) for p in polys]
        return tuple([(n, *[places.setdefault(t, len(places)) for t in tensors]) for n, tensors in patterns])

    def of_atom(self, a: int) -> Pattern:
        """The pattern of an atom. One that reads no tensor is its own."""
        found = self._of_atoms.get(a)
        if found is None:
            atom = self._atoms.atoms[a]
            found = self._find(atom) if atom.tensors else (-1 - a, ())
            self.note(a, found)
        return found

    def of_factors(self, monomial: Monomial) -> list[tuple[int, Exponent]]:
        """The patterns of the factors of a monomial, without the names, in an order that does not depend on these."""
        return sorted([(self.of_atom(a)[0], e) for a, e in monomial])

    def atom_of(self, pattern: Pattern) -> int | None:
        """The atom that has a pattern, if there is one."""
        return self._atoms_by_pattern.get(pattern)

    def note(self, a: int, pattern: Pattern) -> None:
        """Takes down the pattern of an atom."""
        self._of_atoms[a] = pattern
        self._atoms_by_pattern[pattern] = a

    def _find(self, atom: Atom) -> Pattern:
        places: dict[object, int] = {}
        key: list[object] = [atom.kind]
        parts: Iterable[Poly] = atom.args
        if atom.kind == "tensor":
            tensor, *parts = atom.args
            places[tensor] = 0
            key += (tensor in self._atoms.booleans, tensor in self._atoms.integers)
        elif atom.kind in ("exp", "sum"):
            key += self._placed(atom.args[-1], places)
            parts = atom.args[0] if atom.kind == "sum" else ()
        for part in parts:
            number, tensors = self.of(part)
            key.append((number, *[places.setdefault(t, len(places)) for t in tensors]))
        return self._number(tuple(key)), tuple(places)

    def _placed(self, monomial: Monomial, places: dict[object, int]) -> list[tuple[object, ...]]:
        factors: list[tuple[object, ...]] = []
        for a, e in monomial:
            number, tensors = self.of_atom(a)
            factors.append((number, e, *[places.setdefault(t, len(places)) for t in tensors]))
        return factors

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
