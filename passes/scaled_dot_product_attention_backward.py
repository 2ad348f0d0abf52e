"""ScaledDotProductAttentionBackward: the gradients of attention by queries, keys and values, of products and a softmax.

With p the probabilities and g the gradient of the output, the gradients are p^T g by values, d k by queries and d^T q
by keys, where d is what the backward pass of the softmax makes of g v^T. What is between p, g v^T and d is not looked
at here: the numerical proof runs it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from gradfuse.passes.algebra import UNIT, Poly
from gradfuse.passes.matching import TOLERANCE, Builder, FusePass, Mismatch, Rewrite, Site, names_of, softmaxes
from gradfuse.passes.matching.attention import FEWEST_SCORES, Written, pays, written
from gradfuse.passes.matching.attention_operands import Matrices, Operands, in_graph, matrices, source
from gradfuse.passes.matching.cost import ASSUMED_DIM
from gradfuse.passes.matching.rewrite import superfluous
from gradfuse.passes.reading import attribute
from gradfuse.passes.report import NearMiss

FORWARD = "attention"
"""The notes of a site: a product of probabilities and values, and the operator's node that computes the same."""

_READERS = 32  # of a value that are looked at
_ALIKE = {"MatMul", "FusedMatMul", "Einsum"}
_OTHERWISE = (
    "products with probabilities and with their transpose, but the rule reads attention as MatMul of a Softmax node of "
    "MatMul, with numbers, masks and views in between, and its gradients as four more products"
)
_PRODUCTS = (("", "MatMul"), ("com.microsoft", "FusedMatMul"))


@dataclass(frozen=True)
class _Backward:
    """The backward pass of an attention: the gradients as the graph has them, or as their transposes."""

    found: Written
    grad_output: Matrices
    grad_query: Matrices
    grad_key: Matrices
    grad_value: Matrices


class FuseScaledDotProductAttentionBackwardPass(FusePass):
    """Finds a product p^T g with probabilities that a product with values reads too, and from there

    1. the attention that these are the probabilities of (matching/attention.py);
    2. products d k and d^T q with a tensor d of the shape of the scores.

    The operator, and the forward pass that it reads from, take their place where there are scores enough.
    """

    operator = "ScaledDotProductAttentionBackward"
    linear = False
    by_numbers = True
    order = -2

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        found = _backward(site, root)
        return None if found is None else _rewrite(site, builder, found)

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Products of a softmax with values, and of its transpose with a gradient, that are written in another way."""
        for node in site.graph:
            if (node.op_type not in _ALIKE or len(node.inputs) != 2) or node.outputs[0].dtype not in TOLERANCE:
                continue
            value = node.inputs[0]
            if value is None or not site.knows(value):
                continue
            if not _is_long(site.extents(value)):
                yield from _few(site, node)
            elif _is_softmax(site, value) and _is_read_turned(site, value, node):
                yield NearMiss(names_of([node])[0], self.operator, _OTHERWISE)


def _few(site: Site, node: ir.Node) -> Iterator[NearMiss]:
    """What the rule would have proposed at a product of probabilities and a gradient, for more of them."""
    factors = None
    with contextlib.suppress(Mismatch):
        if _backward(site, node.outputs[0], few=True) is not None:
            factors = _factors(site, node)
    for one in factors or ():
        if site.knows(one.value) and _is_softmax(site, one.value):
            rows, keys = (size.integer or ASSUMED_DIM for size in site.extents(one.value)[-2:])
            reason = f"its heads have {rows} x {keys} scores, and the operator is worth it from {FEWEST_SCORES} on"
            yield NearMiss(names_of([node])[0], FuseScaledDotProductAttentionBackwardPass.operator, reason)
            return


def _backward(site: Site, root: ir.Value, *, few: bool = False) -> _Backward | None:
    """The backward pass that a product is part of, of heads with scores enough, or with fewer."""
    factors = _factors(site, root.producer())
    if factors is None:
        return None
    left, right = factors
    for p, grad_output, turned in ((left.transposed, right, False), (right, left.transposed, True)):
        if p.turned or not site.knows(p.value) or _is_long(site.extents(p.value)) == few:
            continue
        for last, index in _readers(site, p.value):
            if index or (last.domain, last.op_type) != _PRODUCTS[0] or last.graph is not site.graph:
                continue
            found = written(site.forms, last, site.first)
            if found is not None and last is not root.producer():
                return _with_gradients(site, found, grad_output, Matrices(root, turned))
    return None


def _is_read(site: Site, node: ir.Node) -> bool:
    """Whether a product is read as the last one of attention, so that something else speaks against the operator."""
    try:
        return (node.domain, node.op_type) == _PRODUCTS[0] and written(site.forms, node, site.first) is not None
    except Mismatch:
        return True


def _is_softmax(site: Site, value: ir.Value) -> bool:
    """Whether a value is one softmax along its last dimension."""
    value = source(value, site.first)
    node, form = value.producer(), site.forms.get(value)
    if form is None or node is None or node.graph is not site.graph:
        return False
    # A product of matrices may have no form, and the softmax of it all the same.
    return any(y == form.poly for y, _ in softmaxes(site.algebra, form.poly, range(len(form.sizes))))


def _is_read_turned(site: Site, value: ir.Value, reader: ir.Node) -> bool:
    """Whether another product reads a value, or its transpose, than the one with values, and no rule looked at both."""
    turned = [node.outputs[0] for node, _ in _readers(site, value) if node.op_type == "Transpose"]
    readers = {node for one in (value, *turned) for node, _ in _readers(site, one)} - {reader}
    if _is_read(site, reader) and any((node.domain, node.op_type) in _PRODUCTS for node in readers):
        return False
    return any(node.op_type in _ALIKE for node in readers)


def _is_long(extents: Sequence[Poly]) -> bool:
    sizes = [size.integer or ASSUMED_DIM for size in extents[-2:]]
    return len(sizes) > 1 and pays(*sizes)


def _readers(site: Site, value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """What reads a value, or one that is the same, and as which input; not all of many."""
    uses = (use for one in site.copies(value) for use in one.uses())
    return ((use.node, use.idx) for use in itertools.islice(uses, _READERS))


def _factors(site: Site, node: ir.Node | None) -> tuple[Matrices, Matrices] | None:
    """Return the factors of a product of matrices; None of another node."""
    if node is None or (node.domain, node.op_type) not in _PRODUCTS or None in node.inputs:
        return None
    if any(attribute(node, name, one) != one for name, one in (("alpha", 1.0), ("transBatchA", 0), ("transBatchB", 0))):
        return None
    left, right = (matrices(value, site.first) for value in node.inputs if value is not None)
    return (
        left.transposed if attribute(node, "transA", 0) else left,
        right.transposed if attribute(node, "transB", 0) else right,
    )


def _with_gradients(site: Site, found: Written, grad_output: Matrices, grad_value: Matrices) -> _Backward:
    scores = site.extents(found.products.outputs[0])
    # There may be several gradients, as onnx-ad has them.
    several = site.extents(grad_output.value)
    scores = [*several[: max(0, len(several) - len(scores))], *scores]
    of_query = dict(_products(site, found, scores, matrices(found.turned_key, site.first).transposed, turned=False))
    of_key = dict(_products(site, found, scores, matrices(found.query, site.first), turned=True))
    for grad_scores, grad_query in of_query.items():
        if grad_scores in of_key:
            return _Backward(found, grad_output, grad_query, of_key[grad_scores], grad_value)
    raise Mismatch("the gradients of its queries and keys are no products with one gradient of its scores")


def _products(
    site: Site, found: Written, scores: Sequence[Poly], factor: Matrices, *, turned: bool
) -> Iterator[tuple[ir.Value, Matrices]]:
    """Yield tensors d of the shape of scores, with their products d f with a factor, or d^T f if turned."""
    transposes = [node.outputs[0] for node, _ in _readers(site, factor.value) if node.op_type == "Transpose"]
    seen = {found.products}
    for value in (factor.value, *transposes):
        for node, _ in _readers(site, value):
            factors = None if node in seen or node.graph is not site.graph else _factors(site, node)
            if factors is None:
                continue
            seen.add(node)
            left, right = factors
            ways = ((left, right, False), (right.transposed, left.transposed, True))
            for grad, other, is_transpose in ways:
                if other == factor and grad.turned == turned and site.knows(grad.value):
                    if _whole(site.extents(grad.value)) == _whole(scores):
                        yield grad.value, Matrices(node.outputs[0], is_transpose)


def _whole(extents: Sequence[Poly]) -> Sequence[Poly]:
    """Return sizes without the ones ahead of all others."""
    return list(itertools.dropwhile(lambda size: size == UNIT, extents))


def _rewrite(site: Site, builder: Builder, backward: _Backward) -> Rewrite:
    operands = Operands(site, builder, backward.found)
    output, logsumexp = operands.forward()
    fused = operands.backward(backward.grad_output, output, logsumexp)
    gradients = operands.gradients(fused)
    wanted = (backward.grad_query, backward.grad_key, backward.grad_value)
    *others, (_, result) = [
        (one.value, in_graph(builder, gradient, one)) for one, gradient in zip(wanted, gradients, strict=True)
    ]
    found = backward.found
    attended = found.last.outputs[0]
    rewrite = replace(
        builder.rewrite("attention-backward", fused[:1], result),
        frontier=(*operands.given, source(backward.grad_output.value, site.first)),
        runs=operands.runs,
        within=operands.within,
        others=tuple(others),
        skips=True,
    )
    gone = set(superfluous(site, replace(rewrite, others=(*rewrite.others, (attended, output)))))
    if not gone.issuperset(found.softmax):
        raise Mismatch("its probabilities are read by something else")
    site.notes(FORWARD)[attended] = output.producer()
    return rewrite
