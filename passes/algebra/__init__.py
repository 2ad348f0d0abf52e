"""Polynomials over the elements of tensors: what canonical forms are written in."""

from gradfuse.passes.algebra.algebra import Algebra
from gradfuse.passes.algebra.atoms import Atom
from gradfuse.passes.algebra.definitions import Positions
from gradfuse.passes.algebra.polynomials import ONE, UNIT, ZERO, Monomial, Poly, TooComplex, number
from gradfuse.passes.algebra.renaming import Renaming, Reordered

__all__ = [
    "ONE",
    "UNIT",
    "ZERO",
    "Algebra",
    "Atom",
    "Monomial",
    "Poly",
    "Positions",
    "Renaming",
    "Reordered",
    "TooComplex",
    "number",
]
