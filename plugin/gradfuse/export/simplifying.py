"""Makes a translated model smaller, and no less exact."""

from __future__ import annotations

from collections.abc import Sequence
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


class _Indexed:
    """A rule that is tried on nodes of its operator alone: trying all on each takes most of the time."""

    def __init__(self, operator: str, rule: rewriter.pattern.RewriteRule) -> None:
        self._operator = operator
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        return self._rule.try_rewrite(model, graph, node, **options) if node.op_type == self._operator else None


_SET = rewriter.pattern.RewriteRuleSet(
    [_Indexed(operator, rule) for operator, found in RULES.items() for rule in found]  # type: ignore[misc]
)


def simplify(model: ir.Model) -> None:
    """Inline functions, fold constants, and drop nodes that change nothing or compute what another one does.

    onnxscript's own optimizer has one rule more, which takes time by the square of the number of nodes, and folds
    batch normalisation into convolutions.
    """
    with quiet():
        inline(model, lambda function: True)
        for _ in range(2):
            fold_constants(model)
            rewriter.rewrite(model, _SET)
        for step in (
            passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            passes.LiftSubgraphInitializersToMainGraphPass(),
            passes.DeduplicateInitializersPass(),
            passes.CommonSubexpressionEliminationPass(),
            passes.OutputFixPass(),
            passes.NameFixPass(),
        ):
            step(model)
