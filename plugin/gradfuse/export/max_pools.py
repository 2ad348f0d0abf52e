"""Puts `aclnn::max_pool_backward` into traced programs, so that maximum pooling need not give indices.

This module imports torch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from gradfuse.custom_ops.max_pool_backward import OPERATOR
from gradfuse.export.decompositions.pooling import per_axis
from gradfuse.torch.ops import register_ops

aten = torch.ops.aten

register_ops()

_FORWARDS: dict[Any, tuple[Any, int]] = {
    aten.max_pool2d_with_indices_backward.default: (aten.max_pool2d_with_indices.default, 2),
    aten.max_pool3d_with_indices_backward.default: (aten.max_pool3d_with_indices.default, 3),
}
"""Gradients of maximum pooling -> the pooling, and its spatial dimensions."""
_DEFAULTS: tuple[Any, ...] = ([], 0, 1, False)
"""Of stride, padding, dilation and ceil_mode."""


def fuse_max_pools(program: ExportedProgram) -> None:
    """Replace gradients of maximum pooling in a program, where their indices are those of a pooling of the same input.

    The maxima are found again: of equal ones the first, as the pooling does.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target in _FORWARDS and _fits(node):
            _fuse(node)
    graph.lint()
    program.graph_module.recompile()


def _fits(node: Node) -> bool:
    """Whether a gradient's indices are those of a pooling with its own input and settings, over items of a batch."""
    pooling, spatial = _FORWARDS[node.target]
    arguments: list[Any] = list(node.args)
    _, input, kernel, *settings, indices = arguments
    if not isinstance(indices, Node) or indices.target is not operator.getitem or indices.args[1] != 1:
        return False
    forward = indices.args[0]
    if not isinstance(forward, Node) or forward.target is not pooling:
        return False
    if not isinstance(input, Node) or forward.args[0] is not input:
        return False
    value = input.meta["val"]
    return bool(
        value.dim() == spatial + 2 and _settings(spatial, *forward.args[1:]) == _settings(spatial, kernel, *settings)
    )


def _settings(spatial: int, kernel: Any, *given: Any) -> tuple[Any, ...]:
    """Kernel, stride, padding and dilation of each spatial dimension, and ceil_mode."""
    stride, padding, dilation, ceil_mode = (*given, *_DEFAULTS[len(given) :])
    lists = (kernel, stride or kernel, padding, dilation)
    return (*(per_axis([one] if isinstance(one, int) else one, spatial) for one in lists), ceil_mode)


def _fuse(node: Node) -> None:
    _, spatial = _FORWARDS[node.target]
    given: list[Any] = list(node.args)
    grad_output, input, kernel, *settings, indices = given
    arguments = (grad_output, input, *_settings(spatial, kernel, *settings))
    with node.graph.inserting_before(node):
        fused = node.graph.call_function(getattr(torch.ops.aclnn, OPERATOR.stem).default, arguments)
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    node.graph.erase_node(node)
    if not indices.users:
        node.graph.erase_node(indices)
