"""Readers of products of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradfuse.passes.algebra import ZERO, Algebra, Poly
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.layouts import Form
from gradfuse.passes.reading.nodes import Opaque, attribute, given, is_float
from gradfuse.passes.reading.reductions import segment_sum
from gradfuse.passes.reading.registry import reads


def _contracted(
    forms: KnownForms, operands: Sequence[Form], labels: Sequence[Sequence[object]], kept: Sequence[object]
) -> Form:
    """The sum of products of the operands, whose dimensions have labels, over the labels that are not kept.

    Raises Opaque for a product of two matrices, whose elements are no simpler as sums: read are rows times rows, outer
    products, sums by a mask or one-hot, and what has a diagonal in it.
    """
    algebra = forms.algebra
    order = [*kept, *dict.fromkeys(label for own in labels for label in own if label not in kept)]
    if any(len(set(own)) != len(own) for own in labels):
        raise Opaque("a diagonal")
    named = list(zip(operands, labels, strict=True))
    wide = [{label for label, group in zip(own, f.groups, strict=True) if group} for f, own in named]
    rows = all((a - b).isdisjoint(kept) or (b - a).isdisjoint(kept) for a in wide for b in wide)
    whole = all(own & set(kept) == wide[0] & set(kept) for own in wide)
    if not (whole or all(own <= set(kept) for own in wide) or any(_selects(algebra, f.poly, rows) for f in operands)):
        raise Opaque("a product of matrices")
    placed = [forms.moved(f, [own.index(label) if label in own else None for label in order]) for f, own in named]
    groups, polys = forms.broadcast(placed)
    joined = Form(groups, ZERO)
    sizes = dict(enumerate(joined.sizes))
    summed = {v: sizes[v] for axis in range(len(kept), len(order)) for v in joined.variables(axis)}
    return Form(groups[: len(kept)], algebra.sum(algebra.product(polys), summed, sizes))


def _selects(algebra: Algebra, poly: Poly, rows: bool) -> bool:
    """Whether a factor is made of conditions only; or, of a matrix times a row, has a diagonal."""
    atoms = [[algebra.atoms[a] for a, _ in monomial] for monomial in poly.terms]
    if all(atom.indicator or atom.kind == "dim" for own in atoms for atom in own):
        return True
    return rows and any(
        atom.kind == "eq" and all(algebra.atoms[a].kind == "var" for m in atom.args[0].terms for a, _ in m)
        for own in atoms
        for atom in own
    )


@reads("MatMul")
def _matmul(forms: KnownForms, node: ir.Node) -> Form:
    return multiplied(forms, forms.operands(node))


def multiplied(forms: KnownForms, operands: Sequence[Form]) -> Form:
    """The product of two forms as matrices, or stacks of matrices."""
    labels: list[list[object]] = []
    for k, form in enumerate(operands):
        rank = len(form.groups)
        own: list[object] = ["k"] if rank == 1 else [("m", "k"), ("k", "n")][k]  # type: ignore[assignment]
        labels.append([*range(2 - rank, 0), *own])
    batch = range(min(2 - len(form.groups) for form in operands), 0)
    kept = [*batch, *(label for label in ("m", "n") if any(label in own for own in labels))]
    return _contracted(forms, operands, labels, kept)


@reads("Gemm")
def _gemm(forms: KnownForms, node: ir.Node) -> Form:
    if not is_float(given(node.inputs, 0)):
        raise Opaque("a factor of integers is rounded")
    operands = forms.operands(node)
    labels = [
        ["k", "m"] if attribute(node, "transA", 0) else ["m", "k"],
        ["n", "k"] if attribute(node, "transB", 0) else ["k", "n"],
    ]
    product = _contracted(forms, operands[:2], labels, ["m", "n"])
    product = Form(product.groups, product.poly.scaled(attribute(node, "alpha", 1.0)))
    if len(operands) == 2:
        return product
    groups, (a, b) = forms.broadcast([product, operands[2]])
    return Form(groups, a + b.scaled(attribute(node, "beta", 1.0)))


@reads("Einsum")
def _einsum(forms: KnownForms, node: ir.Node) -> Form:
    operands = forms.operands(node)
    left, arrow, right = attribute(node, "equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        names = left.replace(",", "").replace(".", "")
        right = ("..." if "." in left else "") + "".join(sorted(c for c in set(names) if names.count(c) == 1))
    if len(terms) != len(operands):
        raise Opaque("an equation for another number of operands")
    pairs = zip(operands, terms, strict=True)
    widths = [len(f.groups) - len(t.replace("...", "")) if "..." in t else 0 for f, t in pairs]
    labels = [_labels(term, width) for term, width in zip(terms, widths, strict=True)]
    kept = _labels(right, max(widths))
    if len(operands) == 1 and [label for label in labels[0] if label in kept] == kept:
        summed = [axis for axis, label in enumerate(labels[0]) if label not in kept]
        if (sums := segment_sum(forms, operands[0], lambda: summed)) is not None:
            return sums
    return _contracted(forms, operands, labels, kept)


def _labels(term: str, width: int) -> list[object]:
    """The labels of a term of an equation, the dimensions of an ellipsis counted from its end."""
    before, dots, after = term.partition("...")
    return [*before, *(range(-width, 0) if dots else ()), *after]
