"""Backward regions that no rule proposes, or that no operator takes: what `explain` names beside the near misses.

What is near one operator is found beside the operator's rules, by the `unmatched` of its pass. Here is the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

from gradfuse.passes.matching import TOLERANCE, Context, ContextPass, FusePass, Site, names_of
from gradfuse.passes.reading import ort_training
from gradfuse.passes.report import NearMiss

CONTRACTIONS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "RNN", "Attention"}
"""Operators that end a region: what is behind them belongs to another layer."""


class FindUnmatchedPass(ContextPass):
    """Adds the regions that are left, when the passes have fused what they could, to the near misses of the report.

    Args:
        steps: the passes that fuse.
    """

    def __init__(self, steps: Iterable[FusePass]) -> None:
        super().__init__()
        self._steps = tuple(steps)
        self._operators = {name: step.operator for step in self._steps for name in step.training_operators}
        self._operators |= {"LSTMGrad": _LSTM, "GRUGrad": _GRU}

    def run(self, context: Context) -> bool:
        for site in context.sites():
            for step in self._steps:
                context.report.near_misses += step.unmatched(site)
            context.report.near_misses += _training_operators(site, self._operators)
            context.report.near_misses += _unrolled_ctc(site)
            context.report.near_misses += _unrolled_recurrences(site)
        return False


def _training_operators(site: Site, operators: Mapping[str, str]) -> Iterator[NearMiss]:
    """Backward passes that are one operator of onnxruntime-training, and that no rule could look into.

    `operators` says of those what a rule would have proposed.
    """
    for node in site.graph:
        of_training = node.domain == ort_training.DOMAIN or node.op_type == "MaxPoolGrad"
        rule = operators.get(node.op_type) if of_training else None
        if rule is None or (site.forms.get(node.outputs[0]) is not None and node.outputs[0] not in site.forms.opaque):
            continue
        reason = _REASONS.get(node.op_type) or site.forms.why_opaque(node) or "an operator that is not read"
        yield NearMiss(names_of([node])[0], rule, f"{node.op_type} of onnxruntime-training: {reason}")


_REASONS = {
    "ReluGrad": "it gives 0 where the result is NaN, and the operator the gradient",
    "MaxPoolGrad": "its indices are not those of a MaxPool of the graph, so that nothing says what was pooled",
    "InvertibleLayerNormalizationGrad": "it has the result of the normalization, and the operator what was normalized",
    **dict.fromkeys(
        ("LSTMGrad", "GRUGrad"),
        "it is of a whole layer, with the products of the input and the weight that the operator leaves outside",
    ),
    "QuickGeluGrad": "its curve is a sigmoid, and the operator has an erf or a tanh",
}
"""Why no rule takes an operator of onnxruntime-training, whatever is around it."""


_LSTM, _GRU = "LstmRecurrenceBackward", "GruRecurrenceBackward"
_GATES = {4: _LSTM, 3: _GRU}
_PRODUCTS = {"MatMul", "Gemm"}
_FEWEST = 3  # products by one weight, each of what the one before gives
_RECURRENCE = (
    "products by one weight, which are written out: how a recurrence was written decides what its gradient is made of, "
    "and no rule looks for one; gradfuse.export_training_step and build_training_step put the operator in"
)


def _unrolled_recurrences(site: Site) -> Iterator[NearMiss]:
    """Products by one weight of as many rows or columns as the gates of a state have, one after another."""
    products: dict[ir.Value, dict[ir.Node, None]] = {}
    for node in site.graph:
        for value in node.inputs[:2] if node.op_type in _PRODUCTS and not node.domain else ():
            weight = None if value is None else _turned_back(value)
            if weight is not None and _operator_of(weight) is not None:
                products.setdefault(weight, {})[node] = None
    if not any(node.op_type == "Sigmoid" for node in site.graph):
        return
    for weight, nodes in products.items():
        if len(nodes) < _FEWEST:
            continue
        steps: dict[ir.Value, int] = {}
        for node in site.graph:
            before = max((steps[v] for v in node.inputs if v is not None and v in steps), default=0)
            if before or node in nodes:
                steps.update(dict.fromkeys(node.outputs, before + (node in nodes)))
        names = names_of(nodes)
        if max(steps.values()) >= _FEWEST and _has_gradient(site, {v for node in nodes for v in node.outputs}):
            reason = f"{len(names)} {_RECURRENCE}"
            yield NearMiss(names[-1], str(_operator_of(weight)), reason, nodes=names)


def _turned_back(value: ir.Value) -> ir.Value:
    node = value.producer()
    while node is not None and node.op_type in ("Transpose", "Identity") and not node.domain and node.inputs[0]:
        value = node.inputs[0]
        node = value.producer()
    return value


def _operator_of(weight: ir.Value) -> str | None:
    """The operator of a recurrence whose state has a weight of this shape."""
    sizes = [] if weight.shape is None else [size for size in weight.shape if isinstance(size, int) and size > 1]
    if len(sizes) != 2 or max(sizes) % min(sizes):
        return None
    return _GATES.get(max(sizes) // min(sizes))


_SHIFTS = {"Pad", "Concat", "Slice", "Gather", "ScatterND", "ScatterElements"}
_LOG_SUMS = {"Log", "ReduceLogSumExp"}
_STEPS = 3  # fewer log-sum-exps of shifted results in a row are no recursion


def _unrolled_ctc(site: Site) -> Iterator[NearMiss]:
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
