"""Casts what torch.onnx.export cannot: `1.0 - mask` of whole numbers is traced as a subtraction from a number.

This module imports torch.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

aten = torch.ops.aten


def cast_operands(program: ExportedProgram) -> None:
    """Cast the tensors of operators that take a number in the place of their first tensor to the result's type.

    torch.onnx.export promotes the types of operands by choosing another overload, and there is none for a number ahead.
    """
    graph = program.graph
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], (int, float)):
            continue
        result = node.meta.get("val")
        others = [
            one for one in node.args[1:] if isinstance(one, Node) and isinstance(one.meta.get("val"), torch.Tensor)
        ]
        if not isinstance(result, torch.Tensor) or not _takes_tensor_first(node):
            continue
        for one in others:
            if one.meta["val"].dtype == result.dtype:
                continue
            with graph.inserting_before(node):
                cast = graph.call_function(aten._to_copy.default, (one,), {"dtype": result.dtype})
            cast.meta = {"val": one.meta["val"].to(result.dtype)}
            node.replace_input_with(one, cast)
            changed = True
    if changed:
        graph.lint()
        program.graph_module.recompile()


def _takes_tensor_first(node: Node) -> bool:
    return node.target in (aten.sub.Tensor, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)
