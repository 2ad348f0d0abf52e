"""Putting polynomials in the place of variables and of atoms, at any depth.

Invariants: what is made of an atom is built by the operation that makes its kind, so the result is in normal form. A
sum is opened before anything enters it, and its bound variables step aside for those of what comes in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from gradfuse.passes.algebra.atoms import Atom
from gradfuse.passes.algebra.monomials import multiplied
from gradfuse.passes.algebra.operations import Operations
from gradfuse.passes.algebra.polynomials import ONE, UNIT, ZERO, Monomial, Poly, collected, number, times


def substitute(algebra: Operations, poly: Poly, names: Mapping[int, Poly]) -> Poly:
    """The polynomial with all variables of `names` replaced at once."""
    free = algebra.free(poly)
    names = {v: p for v, p in names.items() if v in free and p != algebra.var(v)}
    if not names:
        return poly
    result = ZERO
    kept: dict[Monomial, float] = {}
    plain: list[tuple[Monomial, float]] = []
    for m, c in poly.terms.items():
        if algebra.free_of_monomial(m).isdisjoint(names):
            kept[m] = c
            continue
        single = _single_term(algebra, m, c, names)
        if single is not None:
            plain.append(single)
            continue
        term = number(c)
        for a, e in m:
            atom = algebra.atoms[a]
            changed = _in_atom(algebra, atom, names) if atom.free & names.keys() else algebra.of(atom)
            term = algebra.mul(term, changed if e == 1 else algebra.power(changed, e))
        result = result + term
    return result + collected(plain) + Poly(kept)


def opened(algebra: Operations, atom: Atom, variables: Iterable[int]) -> Poly:
    """The summand of a sum atom, with the given variables in the place of the bound ones."""
    key = (atom.id, *variables)
    known = algebra.opened_sums.get(key)
    if known is None:
        names = {b: algebra.var(v) for b, v in zip(algebra.bound_of(atom), key[1:], strict=True)}
        known = algebra.opened_sums[key] = algebra.substitute(Poly({atom.args[1]: 1.0}), names)
    return known


def assuming_inside(algebra: Operations, poly: Poly, index: Poly, size: Poly) -> Poly:
    """The polynomial where every `inside` of the index is 1, whatever its variables are called, at any depth."""
    mine = sorted(algebra.free(index))

    def is_index(x: Poly) -> bool:
        others = algebra.free(x)
        if len(mine) != len(others):
            return False
        renamings = (dict(zip(mine, map(algebra.var, order), strict=True)) for order in itertools.permutations(others))
        return any(x == algebra.substitute(index, names) for names in renamings)

    def one_if_inside(atom: Atom) -> Poly | None:
        return UNIT if atom.kind == "inside" and atom.args[1] == size and is_index(atom.args[0]) else None

    return replace_atoms(algebra, poly, lambda atom: atom.ranged, one_if_inside)


def replace_atoms(
    algebra: Operations,
    poly: Poly,
    concerned: Callable[[Atom], bool],
    new: Callable[[Atom], Poly | None],
    brought: Iterable[Poly] = (),
) -> Poly:
    """The polynomial with what `new` gives in the place of atoms, at any depth.

    Args:
        concerned: whether an atom may be replaced, or one inside it.
        new: what replaces an atom; None where it stays, as its arguments change.
        brought: polynomials with all free variables that `new` brings in.
    """
    known: dict[int, Poly] = {}

    def of_atom(atom: Atom) -> Poly:
        if not concerned(atom):
            return atom.poly
        found = known.get(atom.id)
        if found is None:
            found = new(atom)
            if found is None:
                found = _rebuilt(algebra, atom, of, brought)
            known[atom.id] = found
        return found

    def of(p: Poly) -> Poly:
        if not any(concerned(algebra.atoms[a]) for m in p.terms for a, _ in m):
            return p
        result = ZERO
        for m, c in p.terms.items():
            factors = (algebra.power(of_atom(algebra.atoms[a]), e) for a, e in m)
            result = result + algebra.product(factors).scaled(c)
        return result

    return of(poly)


def _single_term(
    algebra: Operations, monomial: Monomial, coefficient: float, names: Mapping[int, Poly]
) -> tuple[Monomial, float] | None:
    """The term with its variables replaced, if that is one term without equalities, which select nothing."""
    result = ONE
    for a, e in monomial:
        atom = algebra.atoms[a]
        factor: Monomial = ((a, e),)
        if not atom.free.isdisjoint(names):
            changed = _in_atom(algebra, atom, names)
            if e != 1:
                changed = algebra.power(changed, e)
            if len(changed.terms) != 1:
                return None
            ((factor, c),) = changed.terms.items()
            coefficient = times(coefficient, c)
        if not algebra.equalities.isdisjoint([b for b, _ in factor]):
            return None
        result = multiplied(algebra, result, factor) if result else factor
    return result, coefficient


def _in_atom(algebra: Operations, atom: Atom, names: Mapping[int, Poly]) -> Poly:
    """What an atom becomes."""
    relevant = tuple(sorted(((v, p) for v, p in names.items() if v in atom.free), key=lambda i: i[0]))
    key = (atom.id, relevant)
    known = algebra.substituted.get(key)
    if known is None:
        new = dict(relevant)
        if atom.kind == "var":
            known = new[atom.args[0]]
        else:
            renamed = _renamed_sum(algebra, atom, new) if atom.kind == "sum" else None
            if renamed is None:
                renamed = _rebuilt(algebra, atom, lambda p: algebra.substitute(p, new), new.values())
            known = renamed
        algebra.substituted[key] = known
    return known


def _rebuilt(algebra: Operations, atom: Atom, change: Callable[[Poly], Poly], brought: Iterable[Poly]) -> Poly:
    """The atom with its arguments changed, where `change` brings in the free variables of polynomials."""
    match atom.kind:
        case "tensor":
            return algebra.tensor(atom.args[0], [change(p) for p in atom.args[1:]])
        case "exp":
            return algebra.exp(change(Poly({atom.args[0]: 1.0})))
        case "log":
            return algebra.log(change(atom.args[0]))
        case "pow":
            return change(atom.args[0])
        case "eq":
            return algebra.equal_zero(change(atom.args[0]))
        case "lt":
            return algebra.less_than_zero(change(atom.args[0]))
        case "inside":
            return algebra.inside(change(atom.args[0]), atom.args[1])
        case "sum":
            # What comes in may hold sums of the same height, so the bound variables step aside first.
            sizes = atom.args[0]
            variables = algebra.fresh(len(sizes), atom.free.union(*[algebra.free(p) for p in brought]))
            return algebra.sum(change(opened(algebra, atom, variables)), dict(zip(variables, sizes, strict=True)))
        case _:
            raise AssertionError(atom.kind)


def _renamed_sum(algebra: Operations, atom: Atom, names: Mapping[int, Poly]) -> Poly | None:
    """A sum over one variable whose free variables get other names, so that nothing enters or leaves it.

    None for other sums and substitutions.
    """
    targets = {algebra.variable_of(p) for p in names.values()}
    if len(atom.args[0]) != 1 or None in targets or len(targets) != len(names):
        return None
    if targets & (atom.free - names.keys()):
        return None
    changed = algebra.substitute(Poly({atom.args[1]: 1.0}), names)
    if len(changed.terms) != 1:
        return None
    ((monomial, c),) = changed.terms.items()
    return algebra.intern("sum", atom.args[0], monomial).poly.scaled(c)
