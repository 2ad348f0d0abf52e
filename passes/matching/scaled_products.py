"""Products of matrices with a factor of their own, which scales a difference, written apart for the time of a search.

onnxruntime's optimizer makes the factor of a mean squared error's gradient an attribute of the product that reads the
gradient, which is no value of the graph then. What no rewrite has taken comes back after the search.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from gradfuse.passes.matching.graphs import TOLERANCE
from gradfuse.passes.reading.nodes import attribute

_OPERATORS = (("com.microsoft", "FusedMatMul"), ("", "Gemm"))
_SUMS = ("Sub", "Add", "Sum")
_FACTOR = "alpha"
ABSORBED = "gradfuse.absorbed"
"""What the metadata of nodes has that the product does on the way, at no cost."""


class ScaledProducts:
    """The products of a graph whose factor was taken out.

    Args:
        graph: the graph, with types and shapes; it is changed.
        fresh: gives names that nothing else has.
    """

    def __init__(self, graph: ir.Graph, fresh: Callable[[str], str]) -> None:
        self._graph = graph
        self._taken: list[tuple[ir.Node, int, ir.Node, ir.Attr]] = []
        """Each product, which operand was scaled, by which node, and the attribute."""
        for node in list(graph):
            factor = node.attributes.get(_FACTOR) if (node.domain, node.op_type) in _OPERATORS else None
            if factor is not None and not factor.is_ref() and attribute(node, _FACTOR, 1.0) != 1.0:
                index = next((k for k, value in enumerate(node.inputs[:2]) if _is_difference(value, graph)), None)
                if index is not None:
                    self._take(node, index, factor, fresh)

    def _take(self, node: ir.Node, index: int, factor: ir.Attr, fresh: Callable[[str], str]) -> None:
        operand = node.inputs[index]
        assert operand is not None and operand.dtype is not None
        number = ir.tensor(np.asarray(factor.as_float(), operand.dtype.numpy()), dtype=operand.dtype)
        constant = ir.node("Constant", [], {"value": ir.AttrTensor("value", number)})
        scaled = ir.node("Mul", [operand, constant.outputs[0]], name=node.name)
        for one in (constant, scaled):
            one.outputs[0].name, one.outputs[0].type = fresh(one.op_type), ir.TensorType(operand.dtype)
        constant.outputs[0].shape, scaled.outputs[0].shape = ir.Shape([]), operand.shape
        scaled.meta[ABSORBED] = True
        self._graph.insert_before(node, [constant, scaled])
        node.replace_input_with(index, scaled.outputs[0])
        node.attributes[_FACTOR] = ir.AttrFloat32(_FACTOR, 1.0)
        self._taken.append((node, index, scaled, factor))

    def restore(self) -> None:
        """Put back the factors that still scale what they did."""
        for node, index, scaled, factor in self._taken:
            if scaled.graph is not self._graph:
                continue
            operand, number = scaled.inputs
            if node.graph is self._graph and node.inputs[index] is scaled.outputs[0]:
                node.replace_input_with(index, operand)
                node.attributes[_FACTOR] = factor
            if scaled.outputs[0].uses():
                continue
            constant = None if number is None else number.producer()
            self._graph.remove([scaled, *([] if constant is None else [constant])], safe=True)


def _is_difference(value: ir.Value | None, graph: ir.Graph) -> bool:
    """Whether a value is of a type of gradients, and a sum or difference."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.graph is not graph or node.domain or value.dtype not in TOLERANCE:
        return False
    return node.op_type in _SUMS and len(node.inputs) == 2 and value.shape is not None
