"""Softmax rows in a polynomial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from gradfuse.passes.algebra import Algebra, Monomial, Poly
from gradfuse.passes.matching.site import Site


def softmaxes(algebra: Algebra, poly: Poly, variables: Iterable[int]) -> Iterator[tuple[Poly, int]]:
    """Softmax rows that divide some term: y, an element of the row, and the variable that runs along it."""
    variables = list(variables)
    seen: set[int] = set()
    for monomial in poly.terms:
        for a, e in monomial:
            atom = algebra.atoms[a]
            if atom.kind != "sum" or e >= 0 or a in seen or len(atom.args[0]) != 1 or not atom.positive:
                continue
            seen.add(a)
            for j in variables:
                summand = algebra.opened(atom, [j])
                if j not in algebra.free(summand) or len(summand) != 1:
                    continue
                (m,) = summand.terms
                if any(divides(m, n) for n in poly.terms):
                    yield algebra.mul(summand, algebra.of(atom, -1)), j


def divides(factor: Monomial, monomial: Monomial) -> bool:
    """Whether the monomial has every power of the factor, or a higher one of the same sign."""
    powers = {a: float(e) for a, e in monomial}
    return all(powers.get(a, 0.0) * float(e) > 0 and abs(powers[a]) >= abs(float(e)) for a, e in factor)


def flattened_softmaxes(site: Site) -> frozenset[ir.Value]:
    """Views of softmaxes over several axes together, which default opset 12 has, and which become one of rows."""

    def is_flattened(node: ir.Node) -> bool:
        scores = node.inputs[0] if node.op_type == "Softmax" and not node.domain and node.inputs else None
        view = None if scores is None else scores.producer()
        return view is not None and view.op_type in ("Flatten", "Reshape") and not view.domain

    return site.reached("flattened softmaxes", is_flattened, {"Reshape", "Flatten", "Identity", "Unsqueeze", "Squeeze"})
