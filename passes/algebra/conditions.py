"""Conditions: atoms that are worth 1 where they hold and 0 elsewhere.

The normal form:

- a condition on what holds a condition is a choice, ``c f(1) + (1 - c) f(0)``, so conditions do not stand within each
  other;
- what is proven is 1 or 0;
- ``p = 0`` and ``-p = 0`` are one atom; so are, of integers, ``p < 0`` and 1 less its opposite ``-1 - p < 0``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gradfuse.passes.algebra.atoms import Atom, Atoms
from gradfuse.passes.algebra.facts import is_integer, is_not_negative, is_positive
from gradfuse.passes.algebra.operations import Operations
from gradfuse.passes.algebra.polynomials import ONE, UNIT, ZERO, Monomial, Poly, collected, number

# Making conditions


def equal_zero(algebra: Operations, poly: Poly) -> Poly:
    """1 where the polynomial is 0, else 0."""
    if poly.constant is not None:
        return UNIT if poly.constant == 0 else ZERO
    condition = algebra.first_indicator(poly)
    if condition is not None:
        return by_cases(algebra, condition, lambda case: algebra.equal_zero(given(poly, condition, case)))
    if not algebra.tensors(poly) and any(is_not_negative(algebra, p - UNIT) for p in (poly, -poly)):
        return ZERO  # an index that is compared with a negative number
    lead = poly.terms[max(poly.terms)]
    return algebra.of(algebra.intern("eq", poly.scaled(math.copysign(1.0, lead))))


def less_than_zero(algebra: Operations, poly: Poly) -> Poly:
    """1 where the polynomial is negative, else 0."""
    if poly.constant is not None:
        return UNIT if poly.constant < 0 else ZERO
    if is_not_negative(algebra, poly) or is_positive(algebra, poly):
        return ZERO
    if is_not_negative(algebra, number(-1) - poly):
        return UNIT
    condition = algebra.first_indicator(poly)
    if condition is not None:
        return by_cases(algebra, condition, lambda case: algebra.less_than_zero(given(poly, condition, case)))
    if poly.terms.get(ONE, 0.0) < 0 and is_integer(algebra, poly):
        # x < 0 or -1 - x < 0: of these opposites, the one whose constant is not negative.
        return UNIT - algebra.of(algebra.intern("lt", number(-1) - poly))
    return algebra.of(algebra.intern("lt", poly))


def inside(algebra: Operations, index: Poly, size: Poly) -> Poly:
    """1 where the index is at least 0 and below the size, else 0."""
    if index.constant is not None and size.constant is not None:
        return UNIT if 0 <= index.constant < size.constant else ZERO
    condition = algebra.first_indicator(index)
    if condition is not None:
        return by_cases(algebra, condition, lambda case: algebra.inside(given(index, condition, case), size))
    return algebra.of(algebra.intern("inside", index, size))


def by_cases(algebra: Operations, condition: Atom, value: Callable[[bool], Poly]) -> Poly:
    """The choice between what `value` gives where the condition holds (True) and where it does not (False)."""
    yes, no = value(True), value(False)
    return no + algebra.mul(algebra.of(condition), yes - no)


def given(poly: Poly, condition: Atom, case: bool) -> Poly:
    """The polynomial where the condition is known to hold (True) or not to (False)."""
    kept = []
    for m, c in poly.terms.items():
        if any(a == condition.id for a, _ in m):
            if not case:
                continue
            m = tuple(f for f in m if f[0] != condition.id)
        kept.append((m, c))
    return collected(kept)


# Reading conditions


def solve(atoms: Atoms, eq: Atom, variable: int) -> Poly | None:
    """The x for which the equality says `variable == x`; None where it is not of that form."""
    poly: Poly = eq.args[0]
    rest: dict[Monomial, float] = {}
    slope = 0.0
    for m, c in poly.terms.items():
        if (
            len(m) == 1
            and m[0][1] == 1
            and atoms.atoms[m[0][0]].args == (variable,)
            and atoms.atoms[m[0][0]].kind == "var"
        ):
            slope = c
        else:
            rest[m] = c
    x = Poly(rest)
    if abs(slope) != 1.0 or variable in atoms.free(x):
        return None
    return x.scaled(-slope)


def eliminated(atoms: Atoms, eq: Atom) -> tuple[int, Poly | None]:
    """The highest variable that the equality says to be x, and x; -1 and None where there is none."""
    for v in sorted(eq.free, reverse=True):
        x = solve(atoms, eq, v)
        if x is not None:
            return v, x
    return -1, None


def exclude_each_other(a: Atom, b: Atom) -> bool:
    """Whether two equalities say of one thing that it is two numbers."""
    left, right = a.args[0], b.args[0]
    if (left.terms.keys() ^ right.terms.keys()) - {()}:
        return False  # the usual case, at the least cost
    return any((left - right.scaled(sign)).constant not in (None, 0.0) for sign in (1.0, -1.0))


def end_of(atoms: Atoms, poly: Poly) -> tuple[int, Poly] | None:
    """The v and n of a condition [v < n] on an index variable and a size; None for anything else."""
    conditions = atoms.indicators(poly)
    if len(conditions) != 1 or conditions[0].kind != "lt" or poly != conditions[0].poly:
        return None
    for v in conditions[0].free:
        size = atoms.var(v) - conditions[0].args[0]
        if not atoms.free(size) and not atoms.tensors(size):
            return v, size
    return None


def tested_outside(atoms: Atoms, poly: Poly, classes: Poly, *, signed: bool) -> bool:
    """Whether the graph compares elements of the tensor that the polynomial is one of with what is no class.

    Args:
        atoms: those of the graph.
        poly: an element of a tensor of classes.
        classes: how many there are: a size that is not below it is no class.
        signed: whether to look for numbers below 0 as well.
    """
    own = [atoms.atoms[a] for m in poly.terms for a, _ in m]
    if len(own) != 1 or own[0].kind != "tensor" or any(atoms.tensors(index) for index in own[0].args[1:]):
        return False
    for a in atoms.equalities:
        terms = dict(atoms.atoms[a].args[0].terms)
        elements = [m for m in terms if len(m) == 1 and atoms.atoms[m[0][0]].args[:1] == own[0].args[:1]]
        if len(elements) != 1:
            continue
        factor = terms.pop(elements[0])
        value = Poly(terms).scaled(-1.0 / factor)
        known, above = value.integer, (value - classes).integer
        if (signed and known < 0) if known is not None else (above is not None and above >= 0):
            return True
    return False
