"""Products of powers of atoms, and division by them.

What is done here changes exponents only. Products of conditions that say more than each alone are arithmetic.py's.

Invariant: a condition is its own square, so it has no exponent above 1.
"""

from __future__ import annotations

from gradfuse.passes.algebra.atoms import Atoms
from gradfuse.passes.algebra.polynomials import (
    ONE,
    ZERO,
    Exponent,
    Monomial,
    Poly,
    collected,
    plain_exponent,
    raised,
    times,
)
from gradfuse.passes.algebra.sizes import drop_implied


def multiplied(atoms: Atoms, m: Monomial, n: Monomial) -> Monomial:
    """The product of two monomials."""
    powers: dict[int, Exponent] = dict(m)
    for a, e in n:
        known = powers.get(a)
        if known is None:
            powers[a] = e
        elif known + e == 0:
            del powers[a]
        else:
            powers[a] = 1 if known + e > 0 and atoms.atoms[a].idempotent else plain_exponent(known + e)
    if len(atoms.wides) > 1 and sum(a in atoms.wides for a in powers) > 1:
        drop_implied(atoms, powers)
    return tuple(sorted(powers.items()))


def divide_monomial(atoms: Atoms, poly: Poly, monomial: Monomial) -> Poly:
    """The polynomial divided by the monomial."""
    inverse = _inverse(monomial)
    return collected((multiplied(atoms, m, inverse), c) for m, c in poly.terms.items())


def common(poly: Poly) -> Monomial:
    """The largest monomial that divides every term."""
    result: dict[int, Exponent] | None = None
    for m in poly.terms:
        if result is None:
            result = dict(m)
            continue
        powers = dict(m)
        shared: dict[int, Exponent] = {}
        for a in result.keys() | powers.keys():
            if (e := min(result.get(a, 0), powers.get(a, 0))) != 0:
                shared[a] = e
        result = shared
    return tuple(sorted((result or {}).items()))


def content(atoms: Atoms, poly: Poly) -> tuple[float, Monomial, Poly]:
    """The coefficient, monomial and primitive part whose product is the polynomial.

    The primitive part has no common factor, and the coefficient of its first term is 1.
    """
    if not poly:
        return 0.0, ONE, ZERO
    monomial = common(poly)
    reduced = divide_monomial(atoms, poly, monomial) if monomial else poly
    lead = reduced.terms[min(reduced.terms)]
    return lead, monomial, reduced.scaled(raised(lead, -1))


def ratio(atoms: Atoms, poly: Poly, by: Poly) -> Poly | None:
    """poly / by where that is a single term, else None."""
    c, m, p = content(atoms, poly)
    d, n, q = content(atoms, by)
    if not by or not p.close_to(q, 1e-5):
        return None
    return Poly({multiplied(atoms, m, _inverse(n)): times(c, raised(d, -1))})


def _inverse(monomial: Monomial) -> Monomial:
    return tuple([(a, -e) for a, e in monomial])
