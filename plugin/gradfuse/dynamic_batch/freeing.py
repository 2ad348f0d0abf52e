"""`gradfuse.make_batch_dynamic`: makes a model for batches of any size from one with a fixed batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from gradfuse.dynamic_batch import operators, sizes, views
from gradfuse.dynamic_batch.analysis import RULES, Refused, followed
from gradfuse.dynamic_batch.rewriting import Rewriter, note_shapes
from gradfuse.errors import ArgumentError, ModelError, listed
from gradfuse.models import reading
from gradfuse.models.conversion import inline_functions
from gradfuse.models.inlining import graphs_of
from gradfuse.models.memory import collection_paused
from gradfuse.models.propagation import Facts, size_of
from gradfuse.passes import shapes

if TYPE_CHECKING:
    from gradfuse.models.reading import LoadedModel, ModelLike

FAMILIES = (operators, sizes, views)
"""The modules whose import fills the table of rules."""
_NAME = "batch"
_CONSTANTS_IR_VERSION = 4


def make_batch_dynamic(model: ModelLike, axes: Mapping[str, int | None] | None = None) -> Any:
    """Make the fixed batch of a model dynamic.

    The batch is followed from the inputs through every node. Whatever fixes it is rewritten for any size: the shapes of
    Reshape, Expand and Resize, ends of Slice, and constants and initial states, which are repeated for each row. A
    number that merely equals the batch stays.

    Each row of the result's outputs is what the model gives for that row alone, and at the batch of the model the
    outputs are the same. BatchNormalization in training mode still uses the statistics of the whole batch, and outputs
    that are means, sums or extremes over the batch, or a loss, are those of the whole batch.

    Args:
        model: a path, an `onnx.ModelProto`, an `onnx_ir.Model` or a `torch.onnx.ONNXProgram`.
        axes: input -> the axis of the batch, or None if the input is the same for all rows. It is axis 0 of inputs that
            are not named; scalars have none.

    Returns:
        The model, of the same kind, without functions but the bodies of gradfuse's operators. The batch is the symbolic
        dimension `batch`, unless an input names it otherwise.

    Raises:
        ArgumentError: `axes` has a name that is not an input, or an axis that an input does not have, or batch sizes
            differ.
        ModelError: the model cannot be read, or a node fixes the batch or mixes its rows; the one-line text names it.
    """
    with collection_paused():
        loaded = with_dynamic_batch(reading.load(model), "make_batch_dynamic", True if axes is None else axes)
        return loaded.restore(loaded.ir)


def with_dynamic_batch(loaded: LoadedModel, who: str, axes: bool | Mapping[str, int | None]) -> LoadedModel:
    """Do the work of `make_batch_dynamic` on a model itself.

    Args:
        loaded: the model, which is changed.
        who: what the caller is called in messages.
        axes: as for `make_batch_dynamic`; True: none is named.

    Raises:
        ArgumentError: as for `make_batch_dynamic`.
        ModelError: as for `make_batch_dynamic`.
    """
    model = loaded.ir
    if not isinstance(axes, (bool, Mapping)):
        raise ArgumentError(f"{who}: dynamic_batch is {axes!r}; expected True, or a dictionary input -> axis or None")
    if model.functions:
        inline_functions(model, lambda function: (function.domain, function.name) not in RULES)
    if model.ir_version < _CONSTANTS_IR_VERSION:
        # Before, all initializers are inputs.
        model.graph.inputs[:] = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
        model.ir_version = _CONSTANTS_IR_VERSION
    inputs = _inputs(model.graph, who, {} if isinstance(axes, bool) else axes)
    symbol, batch = _batch(model.graph, inputs, who)
    for value, axis in inputs.items():
        assert value.shape is not None
        value.shape = ir.Shape([batch if k == axis else dim for k, dim in enumerate(value.shape)])
    facts = _inferred(model)
    try:
        known = followed(model, facts, batch, inputs)
    except Refused as refused:
        node = refused.node
        operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        name = f"node {node.name!r}" if node.name else f"output {node.outputs[0].name!r}"
        raise ModelError(f"{who}: the batch of {batch} stays fixed: {operator} ({name}) {refused.what}") from None
    Rewriter(model, known, next(iter(inputs.items()))).write()
    note_shapes(model, known, symbol)
    if known.edits:
        RemoveUnusedNodesPass()(model)
    return dataclasses.replace(loaded, older=None)


def _inputs(graph: ir.Graph, who: str, axes: Mapping[str, int | None]) -> dict[ir.Value, int]:
    """Return the inputs that have the batch, and its axis in each."""
    values = {str(value.name): value for value in graph.inputs if value.name not in graph.initializers}
    unknown = [name for name in axes if name not in values]
    if unknown:
        raise ArgumentError(f"{who}: the batch is in {unknown[0]!r}; expected inputs among {listed(values)}")
    found: dict[ir.Value, int] = {}
    for name, value in values.items():
        axis = axes.get(name, 0)
        if axis is None or (name not in axes and value.shape is not None and len(value.shape) == 0):
            continue
        rank = None if value.shape is None else len(value.shape)
        if not isinstance(axis, int) or isinstance(axis, bool) or rank is None or not -rank <= axis < rank:
            shape = "no shape" if rank is None else f"shape {value.shape}"
            raise ArgumentError(
                f"{who}: the batch is axis {axis!r} of {name!r}, which has {shape}; expected one of its axes"
            )
        found[value] = axis % rank
    if not found:
        raise ArgumentError(f"{who}: no input has the batch; expected at least one")
    return found


def _batch(graph: ir.Graph, inputs: Mapping[ir.Value, int], who: str) -> tuple[str, int]:
    """Return the name of the batch, and its size in the model; 1 where the inputs leave it free."""
    dims = {value: value.shape[axis] for value, axis in inputs.items() if value.shape is not None}
    fixed = {value: dim for value, dim in dims.items() if isinstance(dim, int)}
    sizes = sorted(set(fixed.values()))
    if len(sizes) > 1:
        first = next(iter(fixed))
        other = next(value for value, dim in fixed.items() if dim != fixed[first])
        raise ArgumentError(
            f"{who}: the batch is {fixed[first]} in {first.name!r} and {fixed[other]} at axis {inputs[other]} of "
            f"{other.name!r}; expected the axis of each input, or None where one has no batch, as in "
            f"{{{str(other.name)!r}: 1}}"
        )
    if sizes == [0]:
        raise ArgumentError(f"{who}: the batch is 0; expected at least one row")
    names = [dim.value for dim in dims.values() if isinstance(dim, ir.SymbolicDim) and dim.value]
    taken = {
        dim.value for v in graph.inputs if v.shape is not None for dim in v.shape if isinstance(dim, ir.SymbolicDim)
    }
    name = names[0] if names else _NAME
    while not names and name in taken:
        name += "_"
    return str(name), sizes[0] if sizes else 1


def _inferred(model: ir.Model) -> Facts:
    """Return what is known of a model; the inputs of bodies have the sizes of what is around them."""
    given: dict[ir.Value, ir.Shape | None] = {}
    while True:
        facts = shapes.infer(model, [])
        found = False
        for node in model.graph.all_nodes():
            for inner, around in _around(node, facts):
                own = [None] * len(around) if inner.shape is None else [size_of(dim) for dim in inner.shape]
                if inner not in given and len(own) == len(around) and not all(isinstance(size, int) for size in own):
                    given[inner], found = inner.shape, True
                    inner.shape = ir.Shape(a if isinstance(a, int) else b for a, b in zip(own, around, strict=True))
        if not found:
            break
    for inner, shape in given.items():
        inner.shape = shape
    return facts


def _around(node: ir.Node, facts: Facts) -> list[tuple[ir.Value, Any]]:
    """Return the inputs of a loop's body with the sizes of what they take."""
    if node.op_type not in ("Loop", "Scan") or node.domain:
        return []
    (body,) = graphs_of(node)
    pairs = list(zip(body.inputs, node.inputs, strict=False))[0 if node.op_type == "Scan" else 2 :]
    sliced = node.attributes["num_scan_inputs"].as_int() if node.op_type == "Scan" else 0
    axes = node.attributes["scan_input_axes"].as_ints() if "scan_input_axes" in node.attributes else [0] * sliced
    found: list[tuple[ir.Value, Any]] = []
    for k, (inner, outer) in enumerate(pairs):
        sizes = None if outer is None else facts.shapes.get(outer)
        if sizes is not None:
            at = k - len(pairs) + sliced
            found.append((inner, [size for axis, size in enumerate(sizes) if at < 0 or axis != axes[at] % len(sizes)]))
    return found
