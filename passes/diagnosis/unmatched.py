"""Backward regions that no rule proposes, or that no operator takes: what `explain` names beside the near misses.

One function a kind of region, on a graph in which the passes have fused what they could.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.passes.algebra import Poly
from gradfuse.passes.grouped_bias_add_grad import MAX_GROUPS, UNSORTED
from gradfuse.passes.matching import TOLERANCE, VIEWS, Context, ContextPass, Site, names_of, softmaxes
from gradfuse.passes.reading import attribute, ort_training
from gradfuse.passes.report import NearMiss

CONTRACTIONS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "RNN", "Attention"}
"""Operators that end a region: what is behind them belongs to another layer."""

Finder = Callable[[Site], Iterator[NearMiss]]
_FINDERS: list[Finder] = []


def finds(finder: Finder) -> Finder:
    _FINDERS.append(finder)
    return finder


class FindUnmatchedPass(ContextPass):
    """Adds the regions that are left to the near misses of the report, behind the passes that fuse."""

    def run(self, context: Context) -> bool:
        for site in context.sites():
            for find in _FINDERS:
                context.report.near_misses += find(site)
        return False


@finds
def _soft_targets(site: Site) -> Iterator[NearMiss]:
    """p T + R with T = -sum(R) is the backward of a log-softmax for any R; cross entropy has R = a [j = target] + b."""
    algebra = site.algebra
    for node in site.graph:
        if node.domain == custom_ops.DOMAIN or (node.op_type in VIEWS and node.domain == ""):
            continue
        for value in node.outputs:
            form = site.forms.get(value) if value in site.position and value.dtype in TOLERANCE else None
            if form is None or len(form.poly) < 2:
                continue
            for p, j in softmaxes(algebra, form.poly, range(len(form.sizes))):
                (powers,) = (dict(m) for m in p.terms)
                with_p = {m: c for m, c in form.poly.terms.items() if powers.items() <= dict(m).items()}
                rest = Poly({m: c for m, c in form.poly.terms.items() if m not in with_p})
                total = algebra.divide_monomial(Poly(with_p), next(iter(p.terms)))
                if not rest or not total or j in algebra.free(total) or _one_hot(site, rest, j):
                    continue
                sizes = dict(enumerate(form.sizes))
                if not (total + algebra.sum(rest, {j: sizes[j]}, sizes)):
                    yield NearMiss(names_of([node])[0], "CrossEntropyLossGrad", _SOFT)
                    break


def _one_hot(site: Site, poly: Poly, j: int) -> bool:
    """Whether a term is there for one j only: the rule of cross entropy has its say then."""
    atoms = (site.algebra.atoms[a] for m in poly.terms for a, _ in m)
    return any(a.kind == "eq" and site.algebra.solve(a, j) is not None for a in atoms)


_SOFT = (
    "the backward of a log-softmax, but nothing shows that what comes into it is a one-hot of class indices, which the "
    "operator takes: probability targets, a one-hot that is an input, or another loss"
)


_BACKWARDS = {
    "SoftmaxCrossEntropyLossGrad": "CrossEntropyLossGrad",
    "SoftmaxCrossEntropyLossInternalGrad": "CrossEntropyLossGrad",
    "SparseSoftmaxCrossEntropyGrad": "CrossEntropyLossGrad",
    "SoftmaxCrossEntropyGrad": "CrossEntropyLossGrad",
    "LogSoftmaxGrad": "CrossEntropyLossGrad",
    "LogSoftmaxGrad_13": "CrossEntropyLossGrad",
    "SoftmaxGrad": "ScaledMaskedSoftmaxBackward",
    "SoftmaxGrad_13": "ScaledMaskedSoftmaxBackward",
}
"""Training operators of onnxruntime, and the op that a rule would have proposed for them."""


@finds
def _training_operators(site: Site) -> Iterator[NearMiss]:
    """Backward passes that are one operator of onnxruntime-training, and that no rule could look into."""
    for node in site.graph:
        rule = _BACKWARDS.get(node.op_type) if node.domain == ort_training.DOMAIN else None
        if rule is None or (site.forms.get(node.outputs[0]) is not None and node.outputs[0] not in site.forms.opaque):
            continue
        reason = site.forms.why_opaque(node) or "an operator that is not read"
        yield NearMiss(names_of([node])[0], rule, f"{node.op_type} of onnxruntime-training: {reason}")


@finds
def _rows_by_index(site: Site) -> Iterator[NearMiss]:
    """Rows that are added up at an index: of a Gather, an embedding, or a product with a one-hot."""
    for node in site.graph:
        read = _scatter(site, node) or _one_hot_product(site, node)
        if read is None:
            continue
        groups, index = read
        constant = site.forms.constant(index) if index is not None else None
        reasons = []
        if isinstance(groups, int) and groups > MAX_GROUPS:
            reasons.append(f"{groups} groups, more than {MAX_GROUPS}")
        if constant is None:
            reasons.append(UNSORTED)
        elif not reasons:
            reasons.append("its group indices are a constant, and only ends of groups are read")
        yield NearMiss(names_of([node])[0], "GroupedBiasAddGrad", "; ".join(reasons))


def _scatter(site: Site, node: ir.Node) -> tuple[object, ir.Value | None] | None:
    """The number of groups and the index of a node that adds rows at an index of the first dimension."""
    inputs, out = node.inputs, node.outputs[0] if node.outputs else None
    if out is None or out.dtype not in TOLERANCE or len(inputs) < 3:
        return None
    kind = (node.domain, node.op_type)
    index = inputs[2] if kind == (ort_training.DOMAIN, "GatherElementsGrad") else inputs[1]
    form, whole = None if index is None else site.forms.get(index), site.forms.get(out)
    if form is None or whole is None or len(whole.groups) < 2:
        return None
    if kind in ((ort_training.DOMAIN, "GatherGrad"), (ort_training.DOMAIN, "GatherElementsGrad")):
        rows = attribute(node, "axis", 0) == 0
    elif kind == ("", "ScatterND"):
        rows = attribute(node, "reduction", "none") == "add" and bool(form.groups) and not form.groups[-1]
    elif kind == ("", "ScatterElements"):
        adds = attribute(node, "reduction", "none") == "add" and attribute(node, "axis", 0) == 0
        rows = adds and site.algebra.free(form.poly) <= set(form.variables(0))
    else:
        return None
    if not rows or not (form.sizes or site.algebra.tensors(form.poly)):
        return None
    return site.forms.extent(whole.groups[0]).integer, index


def _one_hot_product(site: Site, node: ir.Node) -> tuple[object, ir.Value | None] | None:
    """As :func:`_scatter`, for a product that contracts the rows of a one-hot of an index."""
    if node.domain or node.op_type not in ("MatMul", "Gemm") or len(node.inputs) < 2:
        return None
    out = node.outputs[0]
    for k, (value, flag) in enumerate(zip(node.inputs[:2], ("transA", "transB"), strict=True)):
        form = None if value is None else site.forms.get(value)
        if form is None or len(form.groups) < 2 or len(form.poly) != 1 or out.dtype not in TOLERANCE:
            continue
        last = len(form.groups) - 1
        contracted = (last if k == 0 else last - 1) if not attribute(node, flag, 0) else (last - 1 if k == 0 else last)
        kept = last - 1 if contracted == last else last
        rows, group = list(form.variables(contracted)), list(form.variables(kept))
        ((monomial, _),) = form.poly.terms.items()
        if len(monomial) != 1 or len(rows) != 1 or len(group) != 1:
            continue
        atom = site.algebra.atoms[monomial[0][0]]
        index = site.algebra.solve(atom, group[0]) if atom.kind == "eq" else None
        if index is not None and site.algebra.tensors(index) and rows[0] in site.algebra.free(index):
            return form.sizes[group[0]].integer, None
    return None


@finds
def _rows_by_masks(site: Site) -> Iterator[NearMiss]:
    """[j = g] sum of the rows where the index is g, for each group g: a loop over the groups with masks."""
    algebra = site.algebra
    for node in site.graph:
        value = node.outputs[0] if len(node.outputs) == 1 else None
        if value is None or value not in site.position or value.dtype not in TOLERANCE or node.op_type in VIEWS:
            continue
        form = site.forms.get(value)
        if form is None or len(form.sizes) < 2 or len(form.poly) < 2:
            continue
        groups = set()
        for monomial in form.poly.terms:
            atoms = [algebra.atoms[a] for a, _ in monomial]
            placed = [g.integer for a in atoms if a.kind == "eq" and (g := algebra.solve(a, 0)) is not None]
            masked = any(
                algebra.atoms[a].kind == "eq" and algebra.tensors(algebra.atoms[a].args[0])
                for s in atoms
                if s.kind == "sum"
                for a, _ in s.args[1]
            )
            groups.add(placed[0] if len(placed) == 1 and masked else None)
        if None not in groups and len(groups) > 1:
            reason = f"a loop over {len(groups)} groups, each masked out of all rows; {UNSORTED}"
            yield NearMiss(names_of([node])[0], "GroupedBiasAddGrad", reason)


_SHIFTS = {"Pad", "Concat", "Slice", "Gather", "ScatterND", "ScatterElements"}
_LOG_SUMS = {"Log", "ReduceLogSumExp"}
_STEPS = 3  # fewer log-sum-exps of shifted results in a row are no recursion


@finds
def _ctc(site: Site) -> Iterator[NearMiss]:
    """A recursion in log space, unrolled over time or in a Loop or Scan: the forward of CTC."""
    chains: dict[ir.Value, tuple[int, bool, tuple[ir.Node, ...]]] = {}
    longest: tuple[ir.Node, ...] = ()
    for node in site.graph:
        before = [chains[v] for v in node.inputs if v is not None and v in chains]
        count, shifted, steps = max(before, key=lambda c: c[:2], default=(0, False, ()))
        if node.op_type in CONTRACTIONS:
            continue
        if node.op_type in _LOG_SUMS and (shifted or not count):
            count, shifted, steps = count + 1, False, (*steps, node)
            longest = max(longest, steps, key=len)
        elif node.op_type in _SHIFTS:
            shifted = True
        if count:
            chains.update((v, (count, shifted, steps)) for v in node.outputs)
    if len(longest) > _STEPS and _has_gradient(site, {v for node in longest for v in node.outputs}):
        *_, last = names = names_of(longest)
        yield NearMiss(last, "CtcLossBackward", f"a recursion of {len(names)} steps in log space, {_CTC}", nodes=names)
    for node in site.graph:
        for attr in node.attributes.values():
            if node.op_type in ("Loop", "Scan") and attr.type == ir.AttributeType.GRAPH:
                inner = _recursion(attr.as_graph())
                if inner is not None:
                    yield NearMiss(names_of([node])[0], "CtcLossBackward", f"a {node.op_type} in log space, {_CTC}")


_CTC = (
    "as CTC has it: a CTC loss that is written out is not matched, as its backward depends on how it was written; "
    "put aclnn::CtcLoss and CtcLossBackward into the graph when it is exported"
)


def _has_gradient(site: Site, values: set[ir.Value]) -> bool:
    """Whether an output of the graph depends on the values and has the shape of an input or weight: its gradient."""
    initializers = [v for v in site.graph.initializers.values() if len(v.shape or ()) > 1]
    weights = [list(v.shape) for v in (*site.graph.inputs, *initializers) if v.dtype in TOLERANCE and v.shape]
    later = set(values)
    for node in site.graph:
        if any(v in later for v in node.inputs):
            later.update(node.outputs)
    # onnx-ad gives gradients a further dimension at the end.
    shapes = [list(v.shape) for v in site.graph.outputs if v in later and v.shape is not None]
    return any(shape[: len(weight)] == weight for shape in shapes for weight in weights)


def _recursion(body: ir.Graph) -> ir.Node | None:
    """The log-sum-exp of shifted states in the body of a Loop or Scan, if it gives a state again."""
    state = {v: False for v in body.inputs if v.dtype in TOLERANCE}
    summed: dict[ir.Value, ir.Node] = {}
    for node in body:
        known = [v for v in node.inputs if v is not None and v in state]
        before = next((summed[v] for v in node.inputs if v is not None and v in summed), None)
        if node.op_type in _LOG_SUMS and any(state[v] for v in known):
            before = node
        if known:
            shifted = any(state[v] for v in known) or node.op_type in _SHIFTS
            state.update((v, shifted) for v in node.outputs)
        if before is not None:
            summed.update((v, before) for v in node.outputs)
    return next((summed[v] for v in body.outputs if v in summed), None)
