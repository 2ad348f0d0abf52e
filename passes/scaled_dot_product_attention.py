"""ScaledDotProductAttention: the forward pass of an attention whose gradients the operator's backward pass computes."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from gradfuse.passes.matching import Builder, Context, FusePass, Rewrite, Site
from gradfuse.passes.matching.attention import written
from gradfuse.passes.matching.attention_operands import Operands
from gradfuse.passes.scaled_dot_product_attention_backward import FORWARD

_AGAIN = "attention again"


class FuseScaledDotProductAttentionPass(FusePass):
    """Finds the product of probabilities and values of attention that has the operator's backward pass.

    With that came a forward pass of its own. One takes the place of both.
    """

    operator = "ScaledDotProductAttention"
    linear = False
    by_numbers = True
    order = -1

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        first, last = site.notes(FORWARD).get(root), root.producer()
        found = (
            None
            if first is None or last is None or first.graph is not site.graph
            else written(site.forms, last, site.first)
        )
        if found is None:
            return None
        operands = Operands(site, builder, found)
        output, _ = operands.forward()
        whole = operands.with_nan(output)
        site.notes(_AGAIN)[output] = first
        return replace(
            builder.rewrite("attention", [output], builder.reshape(whole, site.extents(root))),
            frontier=operands.given,
            runs=operands.runs,
            within=operands.within,
            skips=True,
        )

    def run(self, context: Context) -> bool:
        fused = super().run(context)
        for site in context.sites():
            for output, first in site.notes(_AGAIN).items():
                node = output.producer()
                if node is not None and node.graph is site.graph and first.graph is site.graph:
                    for old, new in zip(first.outputs, node.outputs, strict=True):
                        ir.convenience.replace_all_uses_with(old, new)
                    site.graph.remove(first, safe=True)
        return fused
