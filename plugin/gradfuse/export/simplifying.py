"""Makes a translated model smaller, and no less exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnxscript import rewriter
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter.rules import common as rules

from gradfuse.export.reporting import quiet
from gradfuse.models.inlining import inline

# onnxscript's own rules of these take 1e-8 for 0, as the epsilon of a normalisation is, and 1.000005 for 1.
_ZERO, _ONE = (rewriter.pattern.Constant(number, rel_tol=0.0, abs_tol=0.0) for number in (0, 1))


def _same(op: Any, x: ir.Value) -> Any:
    return op.Identity(x)


RULES: dict[str, Sequence[rewriter.pattern.RewriteRule]] = {
    "Mul": rewriter.pattern.RewriteRule(lambda op, x: op.Mul(x, _ONE), _same).commute(),
    "Add": rewriter.pattern.RewriteRule(lambda op, x: op.Add(x, _ZERO), _same).commute(),
    "Sub": [rewriter.pattern.RewriteRule(lambda op, x: op.Sub(x, _ZERO), _same)],
    "Div": [rewriter.pattern.RewriteRule(lambda op, x: op.Div(x, _ONE), _same)],
    "Reshape": [
        rules.two_reshapes_matmul_reshape_rule,
        rules.one_reshape_matmul_reshape_rule,
        rules.materialize_reshape_shape_rule,
        rules.reshape_reshape_rule,
        rules.squeeze_reshape_1d_rule,
    ],
    "Cast": [
        rules.cast_constant_of_shape_rule,
        rules.cast_constant_of_shape_without_value_rule,
        rules.cast_cast_rule,
        rules.no_op_cast_rule,
    ],
    "Slice": [rules.collapse_slice_rule, rules.collapse_slice2_rule],
    "Min": [rules.min_min_rule],
    "Max": [rules.max_max_rule],
    "Expand": [rules.no_op_expand_rule],
    "Flatten": [rules.flatten_to_reshape_rule],
    "Transpose": [rules.no_op_transpose_rule, rules.transpose_transpose_rule],
    "Unsqueeze": [rules.unsqueeze_unsqueeze_rule],
    "ScatterND": [rules.no_op_dynamic_scatter_nd_rule, rules.no_op_static_scatter_nd_rule],
}
"""By the operator that computes what a rule replaces. Each looks at single nodes and what feeds them."""


class _Rules(rewriter.pattern.RewriteRule):
    """All rules as one, which tries on a node those of its operator: asking each rule takes most of the time."""

    name, as_function = None, False

    def __init__(self) -> None:
        # Of the rule that matched last, which the rewriter asks for it. Unused nodes go at the end where it is False.
        self.remove_nodes = False

    def graph_pre_visitor(self) -> None:
        for rule in self._every():
            if rule.graph_pre_visitor:
                rule.graph_pre_visitor()

    def graph_post_visitor(self) -> None:
        for rule in self._every():
            if rule.graph_post_visitor:
                rule.graph_post_visitor()

    def try_rewrite(self, model: ir.Model, graph_or_function: Any, node: ir.Node, **options: Any) -> Any:
        for rule in RULES.get(node.op_type, ()):
            replacement = rule.try_rewrite(model, graph_or_function, node, **options)
            if replacement is not None:
                self.remove_nodes = rule.remove_nodes
                return replacement
        return None

    @staticmethod
    def _every() -> Iterator[rewriter.pattern.RewriteRule]:
        return (rule for found in RULES.values() for rule in found)


def simplify(model: ir.Model) -> None:
    """Inline functions, fold constants, and drop nodes that change nothing or compute what another one does.

    onnxscript's own optimizer has one rule more, which takes time by the square of the number of nodes, and folds
    batch normalisation into convolutions.
    """
    every = rewriter.pattern.RewriteRuleSet([_Rules()])
    types = [(value.type, value.shape) for value in model.graph.outputs]
    with quiet():
        inline(model, lambda function: True)
        for _ in range(2):
            fold_constants(model)
            rewriter.rewrite(model, every)
        for step in (
            passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            passes.LiftSubgraphInitializersToMainGraphPass(),
            passes.DeduplicateInitializersPass(),
            passes.CommonSubexpressionEliminationPass(),
            passes.OutputFixPass(),
            passes.NameFixPass(),
        ):
            step(model)
    for value, (kind, shape) in zip(model.graph.outputs, types, strict=True):
        # Of two that are the same, the one that is kept may be the one of which less is known.
        value.type, value.shape = value.type or kind, value.shape or shape
