"""Labels and indices in a traced program: marks of what PyTorch requires to be in range, until it is translated.

onnxruntime counts negative indices from the end wherever it takes any; of these operators, PyTorch refuses them. This
module imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from gradfuse import _torch_private as private
from gradfuse.export.translation import LOCAL_DOMAIN
from gradfuse.training.batch_checks import Index

aten = torch.ops.aten

_library: Any = torch.library.Library("gradfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("in_range(Tensor index, SymInt size, int? ignored) -> Tensor")
torch.library.register_fake("gradfuse::in_range", lambda index, size, ignored: torch.empty_like(index), lib=_library)
# Decompositions compute what depends on constants of the module alone.
_library.impl("in_range", lambda index, size, ignored: index.clone(), "CompositeExplicitAutograd")

_IN_RANGE, _OP_TYPE = torch.ops.gradfuse.in_range.default, "InRange"


def _in_range_of_items(info: Any, in_dims: Any, index: Tensor, size: Any, ignored: int | None) -> tuple[Tensor, Any]:
    return _IN_RANGE(index, size, ignored), in_dims[0]


torch.library.register_vmap("gradfuse::in_range", _in_range_of_items, lib=_library)
_SIZE, _IGNORED = "size", "ignored"
_IGNORED_BY_DEFAULT = -100
_NO_CLASS = torch.iinfo(torch.int32).min
"""What is ignored where a size says what that is."""

_ALONG_AN_AXIS = (
    *("index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
    *("scatter_reduce_", "index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_"),
)
"""Operators (self, dim, index, ...)."""
_OF_ROWS = ("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
"""Operators (weight, indices, ...)."""
_OF_CLASSES: dict[str, int | None] = {
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), 4),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), 4),
    "multi_margin_loss": None,
}
"""Operators (self, target, ...), by the argument that is ignored; classes are along axis 1, or the only one."""


def mark(program: ExportedProgram) -> None:
    """Mark the indices of a program that the operators which read them refuse if they are out of range.

    A class that is ignored and follows from a size, as of answers beyond the end, becomes a number that is no class.
    """
    for module in program.graph_module.modules():
        # Parts under autocast or `no_grad` are modules of their own.
        if isinstance(module, torch.fx.GraphModule):
            _mark(module.graph)
            module.recompile()


def _mark(graph: Any) -> None:
    for node in list(graph.nodes):
        found = _index_of(node)
        if found is None or not _is_integer(node.args[found.place]):
            continue
        index, ignored = node.args[found.place], found.ignored
        with graph.inserting_before(node):
            if isinstance(ignored, Node):
                index, ignored = _with_fixed_number(graph, index, ignored), _NO_CLASS
                node.update_arg(_OF_CLASSES[_name(node)], ignored)
            size = found.size
            if found.of is not None:
                size = found.of.meta["val"].shape[found.axis] if found.of.meta["val"].dim() else 1
            if not isinstance(size, int):
                known = graph.call_function(aten.sym_size.int, (found.of, found.axis))
                known.meta["val"], size = size, known
            marked = graph.call_function(_IN_RANGE, (index, size, ignored))
        # A size that values decide is bound where the index is computed.
        marked.meta = {key: value for key, value in index.meta.items() if key != "unbacked_bindings"}
        node.update_arg(found.place, marked)


def _with_fixed_number(graph: Any, index: Any, ignored: Any) -> Any:
    """Return an index that has one number where it has another one, which follows from a size."""
    value = index.meta["val"]
    same = graph.call_function(aten.eq.Scalar, (index, ignored))
    same.meta = {"val": torch.empty_like(value, dtype=torch.bool)}
    fixed = graph.call_function(aten.where.ScalarSelf, (same, _NO_CLASS, index))
    fixed.meta = {"val": torch.empty_like(value)}
    return fixed


@dataclasses.dataclass(frozen=True)
class _Read:
    """How a node reads an index: as which argument, of which tensor along which axis, or of which size."""

    place: int
    of: Any = None
    axis: int = 0
    size: int = 0
    ignored: int | Node | None = None


def _name(node: Any) -> str:
    return str(node.target._schema.name.removeprefix("aten::"))


def _index_of(node: Any) -> _Read | None:
    if not private.is_operator(node.target) or node.target.namespace != "aten":
        return None
    name, args = _name(node), node.args
    if name in _ALONG_AN_AXIS and isinstance(args[1], int):
        return _Read(2, args[0], args[1])
    if name in _OF_ROWS:
        return _Read(1, args[0])
    if name == "one_hot" and len(args) > 1 and isinstance(args[1], int) and args[1] > 0:
        return _Read(0, size=args[1])
    if name in _OF_CLASSES:
        place = _OF_CLASSES[name]
        ignored = None if place is None else args[place] if len(args) > place else _IGNORED_BY_DEFAULT
        return _Read(1, args[0], 1 if args[0].meta["val"].dim() > 1 else 0, ignored=ignored)
    return None


def _is_integer(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the function that emits a mark, for `custom_translation_table`."""

    def in_range(index: Any, size: Any, ignored: Any) -> Any:
        inputs = [index, size] if isinstance(size, ir.Value) else [index]
        given = {} if isinstance(size, ir.Value) else {_SIZE: int(size)}
        node = ir.node(_OP_TYPE, inputs, given | ({} if ignored is None else {_IGNORED: ignored}), domain=LOCAL_DOMAIN)
        private.record_node(node)
        return node.outputs[0]

    return {_IN_RANGE: in_range}


def taken_out(model: ir.Model) -> list[Index]:
    """Remove the marks from a translated program, and return what was marked."""
    found: dict[tuple[ir.Value, Any, Any], Index] = {}
    for node in list(model.graph):
        if (node.domain, node.op_type) != (LOCAL_DOMAIN, _OP_TYPE):
            continue
        value = node.inputs[0]
        assert value is not None
        ignored = node.attributes.get_int(_IGNORED) if _IGNORED in node.attributes else None
        size = node.inputs[1] if len(node.inputs) > 1 else node.attributes.get_int(_SIZE)
        assert size is not None
        found.setdefault((value, size, ignored), Index(value, size, ignored))
        marked = node.outputs[0]
        value.shape = marked.shape if value.shape is None else value.shape
        ir.convenience.replace_all_uses_with(marked, value, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    return list(found.values())
