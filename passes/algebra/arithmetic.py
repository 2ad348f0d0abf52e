"""Products, powers, exponentials and logarithms.

The normal form of each:

- products distribute over sums;
- ``[v = x] f(v)`` is ``[v = x] f(x)``, and conditions that exclude each other multiply to 0;
- a power of a single term is a power of its factors; of several terms it is a power of their primitive part, which is
  an atom of kind "pow", times the power of what they have in common. Small positive powers of short sums are expanded;
- ``exp(a + b)`` is ``exp(a) exp(b)``, and ``log(a b)`` is ``log(a) + log(b)`` where both are known to be positive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from gradfuse.passes.algebra.atoms import Atoms
from gradfuse.passes.algebra.conditions import eliminated, exclude_each_other, given
from gradfuse.passes.algebra.facts import is_positive
from gradfuse.passes.algebra.monomials import content, multiplied
from gradfuse.passes.algebra.operations import Operations
from gradfuse.passes.algebra.polynomials import (
    ONE,
    TERM_LIMIT,
    UNIT,
    ZERO,
    Exponent,
    Monomial,
    Poly,
    TooComplex,
    as_exponent,
    collected,
    number,
    plain_exponent,
    raised,
    times,
)

_PRODUCT_LIMIT = 16 * TERM_LIMIT  # products of terms that are worth a try, as some may cancel
_LARGEST_EXPONENT = 700.0  # of e, so that the power is a float64 with all its digits


def mul(algebra: Operations, a: Poly, b: Poly) -> Poly:
    """The product of two polynomials."""
    constant = a.constant
    if constant is not None:
        return b.scaled(constant)
    constant = b.constant
    if constant is not None:
        return a.scaled(constant)
    if len(a) * len(b) > _PRODUCT_LIMIT:
        raise TooComplex("product")
    total = ZERO
    plain: list[tuple[Monomial, float]] = []
    for m, c in a.terms.items():
        for n, d in b.terms.items():
            joined = multiplied(algebra, m, n)
            simplified = _selected(algebra, joined)
            if simplified is None:
                plain.append((joined, times(c, d)))
            else:
                total = total + simplified.scaled(times(c, d))
    return total + collected(plain)


def product(algebra: Operations, polys: Iterable[Poly]) -> Poly:
    """The product of any number of polynomials."""
    result = UNIT
    for p in polys:
        result = algebra.mul(result, p)
    return result


def _selected(algebra: Operations, monomial: Monomial) -> Poly | None:
    """[v = x] f(v) as [v = x] f(x), and [x = 1] [x = 2] as 0. None where nothing changes."""
    equalities = [algebra.atoms[a] for a, _ in monomial if a in algebra.equalities]
    if any(exclude_each_other(a, b) for a, b in itertools.combinations(equalities, 2)):
        return ZERO
    for eq in equalities:
        # Always the same variable of an equation, or two of them would replace each other forever.
        v, x = eliminated(algebra, eq)
        if x is None:
            continue
        rest = tuple(f for f in monomial if f[0] != eq.id)
        if v in algebra.free_of_monomial(rest):
            return algebra.mul(algebra.of(eq), algebra.substitute(Poly({rest: 1.0}), {v: x}))
    return None


def power(algebra: Operations, poly: Poly, exponent: Exponent) -> Poly:
    """The polynomial to the exponent."""
    exponent = plain_exponent(exponent)
    if exponent == 1:
        return poly
    if exponent == 0:
        return UNIT
    if not poly:
        if exponent > 0:
            return ZERO
        raise TooComplex("division by zero")
    if exponent < 0 and _is_condition(algebra, poly):
        raise TooComplex("division by a condition")
    if len(poly) == 1:
        ((m, c),) = poly.terms.items()
        if not isinstance(exponent, int) and (c < 0 or not all(algebra.atoms[a].positive for a, _ in m)):
            return algebra.of(algebra.intern("pow", poly), exponent)
        factors = tuple(
            (a, e) if algebra.atoms[a].idempotent and exponent > 0 else (a, plain_exponent(e * exponent)) for a, e in m
        )
        return Poly({factors: raised(c, exponent)})
    if isinstance(exponent, int) and exponent in (2, 3) and len(poly) <= 4:
        return algebra.mul(poly, algebra.power(poly, exponent - 1))
    c, m, primitive = content(algebra, poly)
    if not isinstance(exponent, int) and (c < 0 or m):
        return algebra.of(algebra.intern("pow", poly), exponent)
    outside = algebra.power(Poly({m: c}), exponent)
    return algebra.mul(outside, algebra.of(algebra.intern("pow", primitive), exponent))


def exponentiate(algebra: Operations, poly: Poly, exponent: float) -> Poly:
    """The polynomial to the power of a constant of the graph, which is a simple fraction but for rounding."""
    return algebra.power(poly, as_exponent(exponent))


def _is_condition(atoms: Atoms, poly: Poly) -> bool:
    """Whether the polynomial is 0 wherever some condition holds, or wherever it does not."""
    if len(poly) == 1:
        return any(atoms.atoms[a].idempotent for m in poly.terms for a, _ in m)
    return any(not given(poly, atom, case) for atom in atoms.indicators(poly) for case in (True, False))


def exp(algebra: Operations, poly: Poly) -> Poly:
    """e to the polynomial."""
    scale = 1.0
    factors = UNIT
    for m, c in poly.terms.items():
        if m == ONE:
            if not -_LARGEST_EXPONENT < c < _LARGEST_EXPONENT:
                raise TooComplex(f"e to the {c}")
            scale = math.exp(c)
            continue
        exponent = as_exponent(c)
        atom = algebra.atoms[m[0][0]]
        # The logarithm of what may be negative is NaN, and so must its exponential be.
        if len(m) == 1 and m[0][1] == 1 and atom.kind == "log" and is_positive(algebra, atom.args[0]):
            factors = algebra.mul(factors, algebra.power(atom.args[0], exponent))
        else:
            factors = algebra.mul(factors, algebra.of(algebra.intern("exp", m), exponent))
    return factors.scaled(scale)


def log(algebra: Operations, poly: Poly) -> Poly:
    """The natural logarithm of the polynomial."""
    if len(poly) != 1:
        return algebra.of(algebra.intern("log", poly))
    ((m, c),) = poly.terms.items()
    if c <= 0:
        return algebra.of(algebra.intern("log", poly))
    result = number(math.log(c))
    for a, e in m:
        atom = algebra.atoms[a]
        if atom.kind == "exp":
            result = result + Poly({atom.args[0]: float(e)})
        elif atom.positive:
            result = result + algebra.of(algebra.intern("log", algebra.of(atom))).scaled(float(e))
        else:
            return algebra.of(algebra.intern("log", poly))
    return result
