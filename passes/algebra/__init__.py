"""Polynomials over the elements of tensors: what canonical forms are written in."""

from gradfuse.passes.algebra.algebra import (
    ONE,
    UNIT,
    ZERO,
    Algebra,
    Atom,
    Monomial,
    Poly,
    Positions,
    TooComplex,
    number,
)
from gradfuse.passes.algebra.patterns import Renaming, Reordered

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
