"""Casts where torch.onnx.export does not, or otherwise than PyTorch, for operators between tensors and numbers.

This module imports torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from gradfuse import _torch_private as private

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


def bound_by_floats(program: ExportedProgram) -> None:
    """Let floats be clamped by floats: `x.clamp(-0.5, 1)`, `x.clamp(0, x.shape[1] - 1)`.

    torch.onnx.export makes a tensor of a whole number that bounds floats, and there is no clamp by a tensor and a
    number.
    """
    graph = program.graph

    def bound(one: Any, node: Node) -> Any:
        if type(one) is int:
            return float(one)
        if not isinstance(one, Node) or not isinstance(one.meta.get("val"), torch.SymInt):
            return one
        with graph.inserting_before(node):
            size = graph.call_function(operator.truediv, (one, 1))
        size.meta = {"val": one.meta["val"] / 1}
        return size

    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.target is aten.clamp.default and isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            node.args = (node.args[0], *(bound(one, node) for one in node.args[1:]))
            node.kwargs = {name: bound(one, node) for name, one in node.kwargs.items()}
    program.graph_module.recompile()


def compute_sizes(program: ExportedProgram) -> None:
    """Let sizes be shifted, and have remainders by fractions, in operators that torch.onnx.export knows."""
    graph = program.graph

    def computed(node: Node, function: Any, *operands: Any) -> Node:
        with graph.inserting_before(node):
            result: Node = graph.call_function(function, operands)
        result.meta = {"val": function(*(one.meta["val"] if isinstance(one, Node) else one for one in operands))}
        return result

    for node in list(graph.nodes):
        if node.target in _SHIFTS:
            number, bits = node.args
            factor = computed(node, operator.pow, 2, bits) if isinstance(bits, Node) else 2**bits
            result = computed(node, _SHIFTS[node.target], number, factor)
        elif node.target is operator.mod and isinstance(node.meta.get("val"), torch.SymFloat):
            times = computed(node, math.floor, computed(node, operator.truediv, *node.args))
            times = computed(node, torch.sym_float, times)
            whole = computed(node, operator.mul, times, node.args[1])
            result = computed(node, operator.sub, node.args[0], whole)
        else:
            continue
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    program.graph_module.recompile()


def divide_downwards(program: ExportedProgram) -> None:
    """Let quotients of sizes below 0 round down, as in `-(-size // 8)`, the number of eights that hold a size.

    torch.onnx.export divides as if numbers were positive, which rounds towards 0. What Python's remainder leaves of a
    number divides without a rest.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is not operator.floordiv or not isinstance(node.meta.get("val"), torch.SymInt):
            continue
        number, divisor = (one.meta["val"] if isinstance(one, Node) else one for one in node.args)
        if private.known_true(number >= 0) and private.known_true(divisor >= 0):
            continue
        with graph.inserting_before(node):
            rest = graph.call_function(operator.mod, node.args)
            whole = graph.call_function(operator.sub, (node.args[0], rest))
        rest.meta = {"val": number % divisor}
        whole.meta = {"val": number - number % divisor}
        node.args = (whole, node.args[1])
    program.graph_module.recompile()


def round_sizes(program: ExportedProgram) -> None:
    """Let sizes that are rounded, as in `math.ceil(0.3 * length)`, be computed in float64, as Python does.

    torch.onnx.export computes them in float32, where 0.3 times 50 is more than 15.
    """
    graph = program.graph
    rounded = [node for node in graph.nodes if node.target in _ROUNDED and node.args[1:] in ((), (None,))]
    if not rounded:
        return
    like = next(value for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor))
    for node in rounded:
        with graph.inserting_before(node):
            exact = _in_float64(graph, node.args[0], like)
            if exact is None:
                continue
            result = _scalar(graph, like, _ROUNDED[node.target], exact)
            whole = _scalar(graph, like, aten._to_copy.default, result, dtype=torch.int64)
            size = graph.call_function(aten._local_scalar_dense.default, (whole,))
        size.meta = dict(node.meta)
        node.replace_all_uses_with(size)
    graph.eliminate_dead_code()
    graph.lint()
    program.graph_module.recompile()


def _in_float64(graph: Graph, number: Any, like: torch.Tensor) -> Node | None:
    """Return a tensor of a number that follows from sizes; None: it is computed in another way."""
    if isinstance(number, (int, float)):
        # A quotient of whole numbers, as torch.onnx.export makes fractions float32.
        parts = (
            _scalar(graph, like, aten.scalar_tensor.default, one, dtype=torch.float64)
            for one in number.as_integer_ratio()
        )
        return _scalar(graph, like, aten.div.Tensor, *parts)
    if isinstance(number.meta["val"], torch.SymInt):
        return _scalar(graph, like, aten.scalar_tensor.default, number, dtype=torch.float64)
    if number.target not in _EXACT:
        return None
    operands = [_in_float64(graph, one, like) for one in number.args]
    return None if None in operands else _scalar(graph, like, _EXACT[number.target], *operands)


def _scalar(graph: Graph, like: torch.Tensor, target: Any, *args: Any, dtype: torch.dtype | None = None) -> Node:
    """Return a call of an operator that gives a tensor of one number, of float64 unless told otherwise."""
    node = graph.call_function(target, args, {} if dtype is None else {"dtype": dtype})
    node.meta = {"val": like.new_empty((), dtype=dtype or torch.float64)}
    return node


def normalise_in_one_type(program: ExportedProgram) -> None:
    """Let layer normalisation of 16 bits by a weight of float32, as under autocast, be in float32, as PyTorch does.

    ONNX's operator has one type for all of its operands.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is not aten.native_layer_norm.default:
            continue
        image = node.args[0]
        # Of a dynamic axis, the normalised shape is a node as well.
        operands = [one for one in node.args if isinstance(one, Node)]
        types = {one.meta["val"].dtype for one in operands}
        if len(types) == 1 or image.meta["val"].dtype not in _NARROW:
            continue
        with graph.inserting_before(node):
            wide = graph.call_function(aten._to_copy.default, (image,), {"dtype": torch.float32})
        wide.meta = {"val": image.meta["val"].to(torch.float32)}
        node.args = (wide, *node.args[1:])
        result, mean, deviation = node.meta["val"]
        node.meta["val"] = result.to(torch.float32), mean.to(torch.float32), deviation.to(torch.float32)
        for part in list(node.users):
            if part.args[1] == 0:
                _round_result(graph, part, result)
    graph.lint()
    program.graph_module.recompile()


def compute_with_numbers(program: ExportedProgram) -> None:
    """Let products and quotients of a tensor of 16 bits and a number be in float32, and round them, as PyTorch does.

    torch.onnx.export rounds the number to 16 bits first: 0.1 becomes 0.09998. In sums, PyTorch does so too, but not
    with the factor `alpha` of a tensor in them.
    """
    graph = program.graph
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.target in _WITH_FACTORS and node.kwargs.get("alpha", 1) != 1 and isinstance(value, torch.Tensor):
            _compute_wide(graph, node)
        if node.target not in _WITH_NUMBERS or not isinstance(value, torch.Tensor) or value.dtype not in _NARROW:
            continue
        numbers = [one for one in node.args if isinstance(one, float)]
        tensors = [one for one in node.args if isinstance(one, Node)]
        exact = all(torch.tensor(one, dtype=value.dtype).double().item() == one for one in numbers)
        if exact or len(tensors) != 1 or tensors[0].meta["val"].dtype != value.dtype:
            continue
        _compute_wide(graph, node)
    graph.lint()
    program.graph_module.recompile()


def _compute_wide(graph: Graph, node: Node) -> None:
    """Let a node take its tensors of 16 bits in float32, and round a result of 16 bits afterwards."""
    for tensor in node.all_input_nodes:
        given = tensor.meta["val"]
        if isinstance(given, torch.Tensor) and given.dtype in _NARROW:
            with graph.inserting_before(node):
                wide = graph.call_function(aten._to_copy.default, (tensor,), {"dtype": torch.float32})
            wide.meta = {"val": given.to(torch.float32)}
            node.replace_input_with(tensor, wide)
    value = node.meta["val"]
    if value.dtype in _NARROW:
        _round_result(graph, node, value)


def _round_result(graph: Graph, node: Node, value: torch.Tensor) -> None:
    """Let a node give float32, and round that to the type of a value."""
    with graph.inserting_after(node):
        narrow = graph.call_function(aten._to_copy.default, (node,), {"dtype": value.dtype})
    narrow.meta = {"val": value}
    node.meta["val"] = value.to(torch.float32)
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)


_ROUNDED: Mapping[Any, Any] = {
    math.ceil: aten.ceil.default,
    math.floor: aten.floor.default,
    math.trunc: aten.trunc.default,
    round: aten.round.default,
}
_SHIFTS: Mapping[Any, Any] = {operator.rshift: operator.floordiv, operator.lshift: operator.mul}
_EXACT: Mapping[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.pow: aten.pow.Tensor_Tensor,
    operator.neg: aten.neg.default,
    torch.sym_float: aten.clone.default,
}
"""Functions of Python's numbers, as operators of tensors."""
_NARROW = (torch.float16, torch.bfloat16)
_WITH_NUMBERS = frozenset(
    getattr(getattr(aten, name), overload) for name in ("mul", "div") for overload in ("Tensor", "Scalar")
)
_WITH_FACTORS = (aten.add.Tensor, aten.sub.Tensor)


def _takes_tensor_first(node: Node) -> bool:
    return node.target in (aten.sub.Tensor, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)
