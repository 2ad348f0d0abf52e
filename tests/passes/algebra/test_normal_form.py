"""The normal form: what the package's docstring says, and that no variable captures another."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
from evaluation import Evaluation

from gradfuse.passes import algebra as package
from gradfuse.passes.algebra import Algebra, Poly, Positions, number
from gradfuse.passes.algebra.facts import range_test

POSITIONS = np.array([1, 1, 0, 1, 0])
X = np.arange(25.0).reshape(5, 5) ** 2
Y = np.arange(5.0) + 1


def test_the_example_is_true() -> None:
    result = doctest.testmod(package)
    assert result.attempted and not result.failed


def _worth(algebra: Algebra, poly: Poly) -> float:
    tensors: dict[object, Any] = {"x": X, "y": Y, "c": POSITIONS}
    return float(Evaluation(algebra, tensors, {"N": 5}).poly(poly, {}))


def test_a_sum_over_two_positions_keeps_them_apart() -> None:
    algebra = Algebra()
    holds, size = algebra.tensor("c", [algebra.var(0)], boolean=True), algebra.dim("N")
    times = algebra.sum(holds, {0: size})
    name = Positions(holds, size, times)
    i, j = (algebra.tensor(name, [algebra.var(v)]) for v in (0, 1))
    at = np.flatnonzero(POSITIONS)
    both = algebra.sum(algebra.tensor("x", [i, j]), {0: times, 1: times})
    assert _worth(algebra, both) == X[np.ix_(at, at)].sum()
    same = algebra.sum(algebra.tensor("x", [i, i]), {0: times})
    assert _worth(algebra, same) == X[at, at].sum()


@pytest.mark.parametrize("outer_first", [True, False])
def test_a_sum_that_enters_a_sum_is_not_captured(outer_first: bool) -> None:
    algebra = Algebra()
    size = algebra.dim("N")

    def row_sum(v: Poly) -> Poly:
        """sum_k x[v, k] y[k]"""
        term = algebra.mul(algebra.tensor("x", [v, algebra.var(7)]), algebra.tensor("y", [algebra.var(7)]))
        return algebra.sum(term, {7: size})

    squared = algebra.mul(row_sum(algebra.var(0)), algebra.tensor("x", [algebra.var(0), algebra.var(1)]))
    order = [0, 1] if outer_first else [1, 0]
    for v in order:
        squared = algebra.sum(squared, {v: size})
    assert _worth(algebra, squared) == ((X @ Y)[:, None] * X).sum()


def test_fresh_variables_are_no_others() -> None:
    algebra = Algebra()
    poly = algebra.var(0)
    for k in range(20):
        poly = algebra.sum(
            algebra.mul(algebra.tensor(f"a{k}", [algebra.var(0), algebra.var(1)]), poly), {1: algebra.dim("N")}
        )
    bound = {v for atom in algebra.atoms if atom.kind == "sum" for v in algebra.bound_of(atom)}
    own = algebra.fresh(3)
    more = algebra.fresh(2, own)
    assert len({*bound, *own, *more, 0, 1}) == len(bound) + 7
    assert own == algebra.fresh(3)


def test_whether_an_index_is_in_range_does_not_depend_on_the_order_of_its_terms() -> None:
    algebra = Algebra()
    row, target = algebra.var(0).scaled(-5), algebra.tensor("t", [algebra.var(1)], integer=True)
    tests = [range_test(algebra, index, number(5), {}) for index in (row + target, target + row)]
    assert tests == [algebra.inside(row + target, number(5))] * 2
