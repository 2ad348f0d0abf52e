"""Puts `aclnn::batch_norm` into traced programs, with a ReLU that follows in it.

`momentum=None` averages over all batches. PyTorch computes with the count of them as a Python number, which a program
would keep; under `cumulative()` it stays a tensor.

This module imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from gradfuse import _torch_private as private
from gradfuse.export.standins import STOP_GRADIENT
from gradfuse.torch.ops import register_ops

aten = torch.ops.aten

register_ops()

_NO_STATISTICS = aten._native_batch_norm_legit.no_stats

KEPT = (aten._native_batch_norm_legit_functional.default, _NO_STATISTICS)
"""The operators that a program must still have."""

_RUNNING = (3, 4)
"""Which of their results are the running statistics."""

_MAX_RANK = 8
_NARROW = (torch.float16, torch.bfloat16)
_FORWARD_TYPES = (torch.float32, *_NARROW)


@contextlib.contextmanager
def cumulative() -> Iterator[None]:
    """Let batch normalisations with `momentum=None` be traced."""
    owner = private.batch_norm_class()
    original = owner.forward

    def forward(self: Any, input: Tensor) -> Any:
        averages = self.momentum is None and self.running_mean is not None and self.num_batches_tracked is not None
        if not (averages and self.training and self.track_running_stats):
            return original(self, input)
        rows = input.detach().to(self.running_mean.dtype)
        axes = [axis for axis in range(rows.dim()) if axis != 1]
        self.num_batches_tracked.add_(1)
        share = (1.0 / self.num_batches_tracked.double()).to(rows.dtype)
        self.running_mean.lerp_(rows.mean(axes), share)
        self.running_var.lerp_(rows.var(axes), share)
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    owner.forward = forward
    try:
        yield
    finally:
        owner.forward = original


def fuse_batch_norms(program: ExportedProgram, *, relu: bool) -> None:
    """Replace batch normalization in training mode in a program, where all tensors have one type but for the input.

    Args:
        program: a decomposed program, which is changed.
        relu: whether a ReLU that is all that reads a result becomes part of the operator.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target in KEPT:
            _stop_behind_statistics(node)
            _fuse_forward(node, fold=relu)
    graph.lint()
    program.graph_module.recompile()


def _stop_behind_statistics(node: Node) -> None:
    """End gradients in running statistics, which PyTorch writes without any: a later call may read them."""
    for result in [user for user in node.users if user.args[1] in _RUNNING]:
        readers = list(result.users)
        with node.graph.inserting_after(result):
            stopped = node.graph.call_function(STOP_GRADIENT, (result,))
        stopped.meta = dict(result.meta)
        for reader in readers:
            reader.replace_input_with(result, stopped)


def _fuse_forward(node: Node, *, fold: bool) -> None:
    *inputs, training, momentum, eps = node.args
    if node.target is _NO_STATISTICS:
        inputs += [None, None]
    x = inputs[0]
    narrow = _value(x).dtype
    # Under autocast the input alone is narrow, and PyTorch computes in the type of the others. Where there are none,
    # the operator would give the statistics in the type of the input.
    wide = {_value(one).dtype for one in inputs[1:] if one is not None} <= {torch.float32}
    is_mixed = narrow in _NARROW and wide
    widened = is_mixed and (narrow == torch.float16 or all(one is None for one in inputs[1:]))
    if not training or narrow not in _FORWARD_TYPES or not (is_mixed or _fit(x, inputs)) or not _has_rank(x):
        return
    results = [user for user in node.users if user.args[1] == 0]
    readers = [reader for result in results for reader in result.users]
    relu = readers[0] if fold and len(readers) == 1 and readers[0].target is aten.relu.default else None
    with node.graph.inserting_before(node):
        if widened and isinstance(x, Node):
            inputs[0] = _cast(x, torch.float32)
        arguments = (*inputs, momentum, eps, relu is not None)
        fused = node.graph.call_function(torch.ops.aclnn.batch_norm.default, arguments)
    _replace(node, fused)
    if widened:
        fused.meta["val"] = tuple(value.float() for value in fused.meta["val"])
    if relu is not None:
        relu.replace_all_uses_with(results[0])
        node.graph.erase_node(relu)
    for result in results if widened else ():
        result.meta["val"] = _value(result).float()
        users = list(result.users)
        with node.graph.inserting_after(result):
            cast = _cast(result, narrow)
        for user in users:
            user.replace_input_with(result, cast)


def _cast(node: Node, dtype: torch.dtype) -> Node:
    cast = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    cast.meta = {"val": _value(node).to(dtype)}
    return cast


def _fit(x: Any, given: Sequence[Any]) -> bool:
    """Whether tensors, of which some may be None, are all of the type of `x`."""
    nodes = [one for one in given if one is not None]
    if not all(isinstance(one, Node) for one in nodes):
        return False
    return len({_value(one).dtype for one in nodes}) == 1


def _has_rank(x: Any) -> bool:
    return 2 <= _value(x).dim() <= _MAX_RANK


def _replace(node: Node, fused: Node) -> None:
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    node.graph.erase_node(node)


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
