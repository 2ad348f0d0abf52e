"""Sizes of dimensions: polynomials in the symbolic dimensions, and in those that the graph computes from others.

Invariant: equal sizes have one name, which is their definition as text, such as ``broadcast(B, N)``, or where that is
long, a number.
"""

from __future__ import annotations

from gradfuse.passes.algebra.atoms import Atoms
from gradfuse.passes.algebra.definitions import DerivedSize
from gradfuse.passes.algebra.polynomials import UNIT, ZERO, Exponent, Poly, number
from gradfuse.passes.algebra.text import text

_LONGEST_NAME = 200
_MOST_PARTS = 16
"""The common size of more sizes is taken as one: their number would grow from layer to layer."""


def slice_size(atoms: Atoms, size: Poly, start: int, stop: int, step: int) -> Poly:
    """The number of elements in a slice, as Python counts them, of a dimension."""
    total = size.integer
    if total is not None:
        return number(len(range(total)[start:stop:step]))
    return _derived(atoms, DerivedSize("slice", (size,), start, stop, step))


def broadcast_size(atoms: Atoms, *sizes: Poly) -> Poly:
    """The common size of dimensions, each of which is 1 or the same as the others."""
    parts_by_name = {text(atoms, p): p for s in sizes for p in parts(atoms, s) if p != UNIT}
    for s in (*sizes, *(p for p in parts_by_name.values() if p.constant is not None)):
        if s.constant is not None and s != UNIT:
            return s
    if len(parts_by_name) < 2:
        return next(iter(parts_by_name.values()), UNIT)
    return _derived(atoms, DerivedSize("broadcast", tuple(parts_by_name[name] for name in sorted(parts_by_name))))


def parts(atoms: Atoms, size: Poly) -> tuple[Poly, ...]:
    """The sizes whose common size this is; any other size alone."""
    if len(size.terms) == 1:
        ((m, c),) = size.terms.items()
        if c == 1.0 and len(m) == 1 and m[0][1] == 1 and atoms.atoms[m[0][0]].kind == "dim":
            definition = atoms.derived.get(atoms.atoms[m[0][0]].args[0])
            if definition is not None and definition.kind == "broadcast" and len(definition.sizes) <= _MOST_PARTS:
                return definition.sizes
    return (size,)


def wide(atoms: Atoms, size: Poly) -> Poly:
    """0 where the size is 1, else 1. An index times this stays at 0 in a dimension that is 1 and so repeated."""
    if size.constant is not None:
        return ZERO if size == UNIT else UNIT
    return atoms.of(atoms.intern("wide", size))


def drop_implied(atoms: Atoms, powers: dict[int, Exponent]) -> None:
    """Takes each "wide" out of a product that follows from another: a size that is not 1 stays so when broadcast."""
    own = [(a, {text(atoms, p) for p in parts(atoms, atoms.atoms[a].args[0])}) for a in powers if a in atoms.wides]
    for a, names in own:
        if any(b != a and others < names for b, others in own):
            del powers[a]


def _derived(atoms: Atoms, size: DerivedSize) -> Poly:
    limits = "" if size.kind == "broadcast" else f", {size.start}:{size.stop}:{size.step}"
    names = [text(atoms, s) for s in size.sizes]
    name = f"{size.kind}({', '.join(names)}{limits})"
    if len(name) > _LONGEST_NAME:
        # Where sizes derive from one another, their texts would double from layer to layer.
        name = f"{size.kind}#{atoms.long_names.setdefault(name, len(atoms.long_names))}"
    atoms.derived[name] = size
    symbols = {str(atoms.atoms[a].args[0]) for s in size.sizes for monomial in s.terms for a, _ in monomial}
    atoms.bases[name] = frozenset().union(*(atoms.bases.get(symbol, {symbol}) for symbol in symbols))
    if size.kind == "broadcast":
        atoms.met[frozenset(name for name in names if name not in atoms.derived)] = None
    atom = atoms.intern("dim", name)
    # A part of a dimension may be empty.
    atom.positive = size.kind == "broadcast"
    return atoms.of(atom)
