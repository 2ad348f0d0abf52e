"""Rewrites what depends on how tensors lie in memory: ONNX has no strides, and decompositions may change them.

This module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from gradfuse._torch_private import known_true

aten = torch.ops.aten

_STRIDED = (aten.as_strided.default, aten.as_strided_copy.default)
_SCATTERED = (aten.as_strided_scatter.default,)


def copy_where_needed(program: ExportedProgram) -> None:
    """Replace `view` by `reshape` in a traced program: decompositions may give tensors that have no such view."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.target is aten.view.default:
                    node.target = aten.reshape.default
            module.recompile()


def forget_layouts(program: ExportedProgram) -> None:
    """Replace views that copy nothing by ones that may, and strided views of all of a tensor by its values.

    1. `view` becomes `reshape`: a decomposition may give a tensor whose layout has no such view.
    2. `as_strided` that shows all elements of its input in their order becomes `reshape`, as does the source of
       `as_strided_scatter` that replaces all of a tensor so. Global average pooling of a tensor in channels-last layout
       has both.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        elif node.target in _STRIDED:
            _reshape(node, node.args[0], node.args[0], node.args[1:])
        elif node.target in _SCATTERED:
            _reshape(node, node.args[1], node.args[0], node.args[2:])
    graph.lint()
    program.graph_module.recompile()


def _reshape(node: Node, source: Any, whole: Any, view: Sequence[Any]) -> None:
    """Replace a node by its source in the node's shape, if a strided view shows all of `whole` in its own order."""
    sizes, strides, *offset = (_known(one) for one in view)
    value = whole.meta["val"]
    in_order = _is_dense(value.shape, value.stride()) and _is_dense(sizes, strides)
    if (offset and offset[0]) or not _equal(math.prod(value.shape), math.prod(sizes)):
        return
    if not in_order and not _have_same_axes((value.shape, value.stride()), (sizes, strides)):
        return
    graph = node.graph
    with graph.inserting_before(node):
        if node.target in _STRIDED:
            size = list(view[0])
        else:
            size = []
            for axis, one in enumerate(node.meta["val"].shape):
                if not isinstance(one, int):
                    known, one = one, graph.call_function(aten.sym_size.int, (whole, axis))
                    one.meta["val"] = known
                size.append(one)
        reshaped = graph.call_function(aten.reshape.default, (source, size))
    reshaped.meta = dict(node.meta)
    node.replace_all_uses_with(reshaped)
    graph.erase_node(node)


def _equal(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal."""
    return known_true(a == b)


def _known(argument: Any) -> Any:
    """Return what a node, or a list of nodes and numbers, stands for."""
    if isinstance(argument, (list, tuple)):
        return [_known(one) for one in argument]
    return argument.meta["val"] if isinstance(argument, Node) else argument


def _is_dense(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether elements lie in memory in their order, without gaps."""
    expected: Any = 1
    for size, stride in reversed(list(zip(sizes, strides, strict=True))):
        if not _equal(size, 1) and not _equal(stride, expected):
            return False
        expected = expected * size
    return True


def _have_same_axes(one: tuple[Sequence[Any], Sequence[Any]], other: tuple[Sequence[Any], Sequence[Any]]) -> bool:
    """Whether the axes of more than one element have the same sizes and strides, in the same order."""
    axes, others = (
        [axis for axis in zip(sizes, strides, strict=True) if not _equal(axis[0], 1)] for sizes, strides in (one, other)
    )
    if len(axes) != len(others):
        return False
    pairs = zip(axes, others, strict=True)
    return all(_equal(size, others_size) and _equal(stride, step) for (size, stride), (others_size, step) in pairs)
