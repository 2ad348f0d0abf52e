"""Backward regions that no rule proposes, or that no operator takes: what `explain` names beside the near misses.

What is near one operator is found beside the operator's rules, by the `unmatched` of its pass. Here is the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

from gradfuse.passes.diagnosis.alignments import written_out
from gradfuse.passes.diagnosis.gradients import has_gradient
from gradfuse.passes.matching import Context, ContextPass, FusePass, Site, names_of
from gradfuse.passes.reading import ort_training
from gradfuse.passes.report import NearMiss


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
            context.report.near_misses += written_out(site)
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
        if max(steps.values()) >= _FEWEST and has_gradient(site, {v for node in nodes for v in node.outputs}):
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
