"""Sums over index variables.

A sum atom holds one product. Each bound variable is in it, and it does not fall apart into a product of sums. To get
there:

- ``sum_j [j = x] f(j)`` becomes ``f(x)`` where x is proven to be in range, else ``inside(x, n) f(x)``: a one-hot row of
  an index out of range is all zeros;
- a sum over a range in which a condition ``j < k`` changes becomes two sums;
- factors without a bound variable leave, and independent factors become sums of their own;
- a sum within a sum joins it;
- bound variables are named by the height of the sum, in the order that gives the smallest summand.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from gradfuse.passes.algebra.atoms import Atom, Atoms, bound_at
from gradfuse.passes.algebra.conditions import given, solve
from gradfuse.passes.algebra.elements import over_positions
from gradfuse.passes.algebra.facts import range_test
from gradfuse.passes.algebra.operations import Operations
from gradfuse.passes.algebra.polynomials import ONE, UNIT, ZERO, Exponent, Monomial, Poly, TooComplex, number
from gradfuse.passes.algebra.substitution import opened

MOST_SUMMED = 4
"""The most variables of one sum: all orders of them are tried."""


def sum_over(
    algebra: Operations, poly: Poly, variables: Mapping[int, Poly], valid: Mapping[int, Poly] | None = None
) -> Poly:
    """The sum over index variables.

    Args:
        variables: the variables to sum over, with their sizes.
        valid: the sizes of all other free variables, as far as they are known. They serve to prove indices in range.
    """
    sizes = dict(valid or {}) | dict(variables)
    for m, c in poly.terms.items() if algebra.positions else ():
        moved = over_positions(algebra, Poly({m: c}), variables)
        if moved is not None:
            rest = Poly({n: d for n, d in poly.terms.items() if n != m})
            return algebra.sum(*moved, valid) + algebra.sum(rest, variables, valid)
    split = _split_range(algebra, poly, variables)
    if split is not None:
        v, condition, at = split
        below = condition.args[0].terms[_only(algebra, v)] > 0
        low = algebra.sum(given(poly, condition, below), {**variables, v: at}, valid)
        if at == variables[v]:
            return low
        high = algebra.substitute(given(poly, condition, not below), {v: algebra.var(v) + at})
        return low + algebra.sum(high, {**variables, v: variables[v] - at}, valid)
    result = ZERO
    for m, c in poly.terms.items():
        result = result + _sum_of_term(algebra, m, dict(variables), sizes).scaled(c)
    return result


def _only(atoms: Atoms, variable: int) -> Monomial:
    ((m, _),) = atoms.var(variable).terms.items()
    return m


def _split_range(atoms: Atoms, poly: Poly, variables: Mapping[int, Poly]) -> tuple[int, Atom, Poly] | None:
    """A condition v < n or v > n, and the number of v below the change; None where no v has one in its range."""
    for a in sorted({a for m in poly.terms for a, _ in m}):
        condition = atoms.atoms[a]
        if condition.kind != "lt" or len(condition.free) != 1 or not condition.free & variables.keys():
            continue
        (v,) = condition.free
        terms = dict(condition.args[0].terms)
        slope, offset = terms.pop(_only(atoms, v), 0.0), terms.pop(ONE, 0.0)
        if terms or abs(slope) != 1.0 or offset != int(offset):
            continue
        at = -offset if slope > 0 else offset + 1
        above = (variables[v] - number(at)).terms.values()
        if at > 0 and all(c > 0 for c in above):
            return v, condition, number(at)
        if at > 0 and all(c < 0 for c in above):
            return v, condition, variables[v]
    return None


def _sum_of_term(
    algebra: Operations, monomial: Monomial, variables: dict[int, Poly], sizes: Mapping[int, Poly]
) -> Poly:
    for a, _ in monomial:
        if a not in algebra.equalities:
            continue
        eq = algebra.atoms[a]
        for v in eq.free & variables.keys():
            x = solve(algebra, eq, v)
            in_range = None if x is None else range_test(algebra, x, variables[v], sizes)
            if x is not None and in_range is not None:
                rest = Poly({tuple(f for f in monomial if f[0] != a): 1.0})
                left = {w: s for w, s in variables.items() if w != v}
                return algebra.sum(algebra.mul(in_range, algebra.substitute(rest, {v: x})), left, sizes)
    free = algebra.free_of_monomial(monomial)
    times = UNIT
    for v in [v for v in variables if v not in free]:
        times = algebra.mul(times, variables.pop(v))
    inner = tuple(f for f in monomial if algebra.atoms[f[0]].free & variables.keys())
    outer = tuple(f for f in monomial if f not in inner)
    result = algebra.mul(times, Poly({outer: 1.0}))
    for names, factors in _independent(algebra, inner, set(variables)):
        result = algebra.mul(result, _sum_atom(algebra, factors, {v: variables[v] for v in names}))
    return result


def _independent(atoms: Atoms, monomial: Monomial, variables: set[int]) -> list[tuple[set[int], Monomial]]:
    """The factors in groups that share no variable, each with its variables."""
    groups: list[tuple[set[int], list[tuple[int, Exponent]]]] = []
    for f in monomial:
        names = set(atoms.atoms[f[0]].free & variables)
        factors = [f]
        rest = []
        for g in groups:
            if g[0] & names:
                names |= g[0]
                factors += g[1]
            else:
                rest.append(g)
        groups = [*rest, (names, factors)]
    return [(names, tuple(sorted(factors))) for names, factors in groups]


def _sum_atom(algebra: Operations, monomial: Monomial, variables: dict[int, Poly]) -> Poly:
    # A sum within the sum joins it, so that the order of summation leaves no trace.
    if len(monomial) == 1 and monomial[0][1] == 1 and algebra.atoms[monomial[0][0]].kind == "sum":
        inner = algebra.atoms[monomial[0][0]]
        own = algebra.fresh(len(inner.args[0]), inner.free)
        return algebra.sum(opened(algebra, inner, own), variables | dict(zip(own, inner.args[0], strict=True)))
    if len(variables) > MOST_SUMMED:
        raise TooComplex(f"a sum over more than {MOST_SUMMED} variables")
    height = algebra.height_of(monomial) + 1
    bound = bound_at(height, len(variables))
    candidates = []
    for order in itertools.permutations(variables):
        names = dict(zip(order, map(algebra.var, bound), strict=True))
        renamed = algebra.substitute(Poly({monomial: 1.0}), names)
        if len(renamed) != 1 or algebra.height_of(next(iter(renamed.terms))) != height - 1:
            raise TooComplex("a summand that its variables' names change")
        ((m, c),) = renamed.terms.items()
        candidates.append((m, c, tuple(variables[v] for v in order)))
    m, c, sizes = candidates[0]
    if len(candidates) > 1:
        # The choice does not depend on the names of tensors, unless the candidates differ by nothing else.
        m, c, sizes = min(candidates, key=lambda candidate: (algebra.patterns.of_factors(candidate[0]), candidate[0]))
    return algebra.of(algebra.intern("sum", sizes, m)).scaled(c)
