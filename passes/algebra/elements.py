"""Elements of opaque tensors, and the positions that NonZero finds.

The normal form:

- an element at an index that is a choice is a choice of elements, so an index holds no condition;
- a sum over the positions of a condition is a sum over all positions, times the condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradfuse.passes.algebra.atoms import Atom
from gradfuse.passes.algebra.conditions import by_cases, given
from gradfuse.passes.algebra.definitions import Positions
from gradfuse.passes.algebra.operations import Operations
from gradfuse.passes.algebra.polynomials import UNIT, ZERO, Poly
from gradfuse.passes.algebra.substitution import replace_atoms


def tensor(
    algebra: Operations, name: object, indices: Iterable[Poly], boolean: bool = False, integer: bool = False
) -> Poly:
    """The element of an opaque tensor at these indices, one for each dimension whose size is not 1.

    Args:
        name: what identifies the tensor; any hashable object.
        boolean: whether its elements are 0 or 1.
        integer: whether its elements are integers.
    """
    indices = tuple(indices)
    if boolean:
        algebra.booleans.add(name)
    if integer:
        algebra.integers.add(name)
    if isinstance(name, Positions):
        algebra.positions.setdefault(name, len(algebra.positions))
        if not indices[0] and algebra.substitute(name.condition, {0: ZERO}) == UNIT:
            return ZERO
    for k, index in enumerate(indices):
        condition = algebra.first_indicator(index)
        if condition is not None:
            return _chosen(algebra, name, indices, k, condition)
    return algebra.of(algebra.intern("tensor", name, *indices))


def _chosen(algebra: Operations, name: object, indices: tuple[Poly, ...], k: int, condition: Atom) -> Poly:
    """The choice of elements that a condition in the index `k` makes."""

    def element(case: bool) -> Poly:
        return algebra.tensor(name, (*indices[:k], given(indices[k], condition, case), *indices[k + 1 :]))

    return by_cases(algebra, condition, element)


def over_positions(
    algebra: Operations, term: Poly, variables: Mapping[int, Poly]
) -> tuple[Poly, dict[int, Poly]] | None:
    """A sum over the positions of a condition as one over all positions, times the condition; and its variables.

    None if no variable is the number of a position and nothing else.
    """
    names = [name for name in algebra.tensors(term) if isinstance(name, Positions)]
    for name in sorted(names, key=algebra.positions.__getitem__):
        for v, size in variables.items():
            if size != name.times or v not in algebra.free(term):
                continue
            (position,) = algebra.fresh(1, algebra.free(term) | variables.keys())
            moved = _at_position(algebra, term, name, v, algebra.var(position))
            if v not in algebra.free(moved):
                left = {w: s for w, s in variables.items() if w != v}
                holds = algebra.substitute(name.condition, {0: algebra.var(position)})
                return algebra.mul(holds, moved), left | {position: name.size}
    return None


def _at_position(algebra: Operations, term: Poly, name: Positions, number: int, position: Poly) -> Poly:
    """The term with `position` for the element of a tensor of positions that has this number, a variable."""
    element = (name, algebra.var(number))

    def concerned(atom: Atom) -> bool:
        return number in atom.free and name in atom.tensors

    def new(atom: Atom) -> Poly | None:
        return position if atom.kind == "tensor" and atom.args == element else None

    return replace_atoms(algebra, term, concerned, new, [position])
