"""What is certain about the value of a polynomial, whatever the tensors hold: its sign, its type, its range.

Every question is answered "yes" only if it is proven. "No" means unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradfuse.passes.algebra.atoms import Atom, Atoms
from gradfuse.passes.algebra.monomials import divide_monomial
from gradfuse.passes.algebra.operations import Operations
from gradfuse.passes.algebra.polynomials import UNIT, ZERO, Poly, TooComplex


def is_integer(atoms: Atoms, poly: Poly) -> bool:
    """Whether the polynomial is a sum of products of integers."""
    return all(
        c == int(c) and all(e == int(e) and e > 0 and _is_integer_atom(atoms, atoms.atoms[a]) for a, e in m)
        for m, c in poly.terms.items()
    )


def is_count(atoms: Atoms, poly: Poly) -> bool:
    """Whether the polynomial is an integer made of indices, dimensions and numbers of conditions that hold."""
    own = (atoms.atoms[a] for m in poly.terms for a, _ in m)
    return is_integer(atoms, poly) and all(atom.indicator or atom.kind in ("var", "dim", "sum") for atom in own)


def _is_integer_atom(atoms: Atoms, atom: Atom) -> bool:
    if atom.kind == "sum":
        return all(e > 0 and _is_integer_atom(atoms, atoms.atoms[a]) for a, e in atom.args[1])
    return atom.idempotent or atom.kind in ("var", "dim") or (atom.kind == "tensor" and atom.args[0] in atoms.integers)


def is_positive(atoms: Atoms, poly: Poly) -> bool:
    """Whether every factor of every term is positive."""
    return all(c > 0 and all(atoms.atoms[a].positive for a, _ in m) for m, c in poly.terms.items())


def is_not_negative(algebra: Operations, poly: Poly) -> bool:
    """Whether the polynomial stays at 0 or above for every value of what is in it.

    Index variables and dimensions are 0 or more, conditions are at most 1, and the number of times that a condition
    holds is at most the number of elements.
    """
    lowest = ZERO
    for m, c in poly.terms.items():
        kinds = {algebra.atoms[a].kind for a, _ in m}
        if kinds <= {"var", "dim"}:
            if kinds and "var" in kinds:
                if c < 0:
                    return False
                continue
            lowest = lowest + Poly({m: c})
            continue
        atom = algebra.atoms[m[0][0]]
        counts = atom.kind == "sum" and all(algebra.atoms[a].indicator for a, _ in atom.args[1])
        if len(m) != 1 or m[0][1] != 1 or not (atom.indicator or counts):
            return False
        if c < 0:
            lowest = lowest + (algebra.product(atom.args[0]) if counts else UNIT).scaled(c)
    return all(c >= 0 for c in lowest.terms.values())


def is_boolean(algebra: Operations, poly: Poly) -> bool:
    """Whether the polynomial is 0 or 1: it is its own square."""
    try:
        return algebra.mul(poly, poly) == poly
    except TooComplex:
        return False


def inside_proven(algebra: Operations, index: Poly, size: Poly, sizes: Mapping[int, Poly]) -> bool:
    """Whether the index is at least 0 and below the size for all values of its variables, of the given sizes."""
    return range_test(algebra, index, size, sizes) == UNIT


def range_test(algebra: Operations, index: Poly, size: Poly, sizes: Mapping[int, Poly]) -> Poly | None:
    """1 where the index is in range: 1 if that is proven, a condition for data, None if it cannot be told."""
    if index.constant is not None:
        limit = size.constant
        return UNIT if index.constant >= 0 and (limit is None or index.constant < limit) else None
    if any(algebra.atoms[a].kind in ("tensor", "sum", "pow") for m in index.terms for a, _ in m):
        return algebra.inside(index, size)
    low, high = ZERO, ZERO
    for m, c in index.terms.items():
        v = [a for a, _ in m if algebra.atoms[a].kind == "var"]
        if not v:
            low, high = low + Poly({m: c}), high + Poly({m: c})
            continue
        variable = algebra.atoms[v[0]].args[0]
        if len(v) > 1 or (v[0], 1) not in m or c < 0 or variable not in sizes:
            return None
        factor = divide_monomial(algebra, Poly({m: c}), ((v[0], 1),))
        high = high + algebra.mul(factor, sizes[variable] - UNIT)
    spare = size - UNIT - high
    proven = all(c >= 0 for c in low.terms.values()) and all(c >= 0 for c in spare.terms.values())
    return UNIT if proven else None
