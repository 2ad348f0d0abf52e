"""class Algebra: the state of one analysis, and all operations on its polynomials under one name.

The state is the table of atoms (atoms.py) and what was computed before (operations.py). The operations are functions
of the modules below; each module keeps one part of the normal form, which the package's docstring describes.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradfuse.passes.algebra import arithmetic, conditions, elements, facts, monomials, sizes, substitution, sums
from gradfuse.passes.algebra.operations import Operations
from gradfuse.passes.algebra.polynomials import Pattern, Poly
from gradfuse.passes.algebra.text import text


class Algebra(Operations):
    """The table of atoms of one analysis, and the operations on polynomials over them."""

    # Arithmetic
    mul = arithmetic.mul
    product = arithmetic.product
    power = arithmetic.power
    exponentiate = arithmetic.exponentiate
    exp = arithmetic.exp
    log = arithmetic.log
    divide_monomial = monomials.divide_monomial
    common = staticmethod(monomials.common)
    content = monomials.content
    ratio = monomials.ratio

    # Conditions
    equal_zero = conditions.equal_zero
    less_than_zero = conditions.less_than_zero
    inside = conditions.inside
    given = staticmethod(conditions.given)
    solve = conditions.solve
    end_of = conditions.end_of
    tested_outside = conditions.tested_outside

    # Facts
    is_integer = facts.is_integer
    is_count = facts.is_count
    is_boolean = facts.is_boolean
    is_positive = facts.is_positive
    inside_proven = facts.inside_proven

    # Tensors, sums and substitution
    tensor = elements.tensor
    sum = sums.sum_over
    opened = substitution.opened
    substitute = substitution.substitute
    assuming_inside = substitution.assuming_inside

    # Sizes
    slice_size = sizes.slice_size
    broadcast_size = sizes.broadcast_size
    parts = sizes.parts
    wide = sizes.wide

    text = text

    def pattern(self, poly: Poly) -> Pattern:
        """What is left of a polynomial without the names of the tensors that it reads, and these names."""
        return self.patterns.of(poly)

    def joint_pattern(self, polys: Iterable[Poly]) -> tuple[tuple[int, ...], ...]:
        """The patterns of several polynomials, and which of the tensors in them are the same."""
        return self.patterns.joint(polys)
