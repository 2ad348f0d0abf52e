"""Converts a model to a newer opset, without changing its results in onnxruntime.

onnx.version_converter drops attributes (of Upsample and Resize), functions and subgraphs. Here every operator whose
meaning changed has an adapter, from its first version that differs; all others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.errors import ModelError
from gradfuse.models.inlining import Names, graphs_of, inline
from gradfuse.models.propagation import Facts

Adapter: TypeAlias = "Callable[[_Place], None]"

_ADAPTERS: dict[str, list[tuple[int, Adapter]]] = {}

_LAST = -1
_COORDINATES = "coordinate_transformation_mode"


def raise_opset(model: ir.Model, opset: int) -> None:
    """Raise the default opset of a model and of its functions, in place.

    Args:
        model: the model, of opset 7 or newer.
        opset: the new version; parts that are newer stay as they are.

    Raises:
        ModelError: a node has no equivalent in the newer opset. The model is then unusable.
    """
    ranks = _Ranks(model)
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for holder in holders:
        imports = model.opset_imports if isinstance(holder, ir.Graph) else holder.opset_imports
        before = imports.get("", opset)
        if before >= opset:
            continue
        names = Names(holder)
        graphs = [holder.graph if isinstance(holder, ir.Function) else holder]
        while graphs:
            graph = graphs.pop()
            for node in list(graph):
                graphs += graphs_of(node)
                if node.domain == "":
                    _raise_node(node, before, opset, names, ranks)
        imports[""] = opset


def inline_functions(model: ir.Model, chosen: Callable[[ir.Function], bool] = lambda function: True) -> None:
    """Inline functions, in place; they may have other opsets than the model.

    Args:
        model: the model, whose parts get the newest default opset that one of them has.
        chosen: which functions to put in.

    Raises:
        ModelError: a function cannot be inlined. The model is then unusable.
    """
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    opsets = {holder.opset_imports[""] for holder in holders if "" in holder.opset_imports}
    if len(opsets) > 1:
        raise_opset(model, max(opsets))
    try:
        inline(model, chosen)
    except ValueError as error:
        raise ModelError(f"a function cannot be put in the place of its calls: {error}") from error


def _raise_node(node: ir.Node, before: int, opset: int, names: Names, ranks: _Ranks) -> None:
    for since, adapter in sorted(_ADAPTERS.get(node.op_type, ()), key=lambda pair: pair[0]):
        if before < since <= opset:
            adapter(_Place(node, names, ranks))
            # What an older operator has become is written as of the version in which it changed.
            if node.graph is None:
                return


def _since(version: int, *op_types: str) -> Callable[[Adapter], Adapter]:
    """Register an adapter: it converts a node of an older version to this one."""

    def put(adapter: Adapter) -> Adapter:
        for op_type in op_types:
            _ADAPTERS.setdefault(op_type, []).append((version, adapter))
        return adapter

    return put


class _Ranks:
    """The ranks of values of a model that follow from its inputs, whatever it declares of results.

    onnxruntime goes on with a warning where that is wrong.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._known: dict[ir.Value, int] | None = None

    def of(self, value: ir.Value) -> int | None:
        """Return the rank of a value; None where it is not known, and where the model declares none."""
        if value.shape is None:
            return None
        if self._known is None:
            self._known = self._followed()
        return self._known.get(value)

    def _followed(self) -> dict[ir.Value, int]:
        inside = [value for graph in self._model.graph.subgraphs() for value in graph.inputs]
        results = [value for node in self._model.graph.all_nodes() for value in node.outputs]
        declared = {value: value.shape for value in (*inside, *results)}
        for value in declared:
            value.shape = None
        followed = {value: len(sizes) for value, sizes in Facts(self._model).shapes.items()}
        for value, shape in declared.items():
            value.shape = shape
        return followed


class _Place:
    """A node that is rewritten, and the place for nodes before it."""

    def __init__(self, node: ir.Node, names: Names, ranks: _Ranks) -> None:
        self.node = node
        self._names, self._ranks = names, ranks

    @property
    def x(self) -> ir.Value:
        """The node's first input."""
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def rank(self) -> int | None:
        """The rank of the node's first input, where it is known whatever the model declares."""
        return self._ranks.of(self.x)

    def take(self, name: str, default: Any = None) -> Any:
        """Remove an attribute, and return its value."""
        found = self.node.attributes.pop(name, None)
        if found is None or found.value is None:
            return default
        return list(found.value) if isinstance(found.value, (tuple, list)) else found.value

    def set(self, name: str, value: Any) -> None:
        self.node.attributes[name] = ir.convenience.convert_attribute(name, value)

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Insert a node before this one; return its output."""
        new = ir.node(op_type, inputs, attributes, name=self._names.fresh("node", f"{self.node.name}/{op_type}"))
        new.outputs[0].name = self._names.fresh("value", f"{self.node.outputs[0].name}/{op_type}")
        assert self.node.graph is not None
        self.node.graph.insert_before(self.node, new)
        return new.outputs[0]

    def constant(self, numbers: npt.ArrayLike, dtype: Any = np.int64) -> ir.Value:
        array = np.asarray(numbers, dtype)
        value = self.op("Constant", value=ir.tensor(array))
        value.dtype, value.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
        return value

    def number(self, number: float) -> ir.Value:
        """A constant scalar of the type of the node's first input."""
        dtype = self.x.dtype
        if dtype is None:
            return self.op("CastLike", self.constant(number, np.float32), self.x)
        # As a kernel casts an attribute: what is beyond the type is its largest number.
        if dtype.is_floating_point():
            largest = float(ir.DataType(dtype).max)
            number = min(max(number, -largest), largest) if np.isfinite(number) else number
        return self.constant(np.asarray(number, np.float64).astype(dtype.numpy()), dtype.numpy())

    def inputs(self, *inputs: ir.Value | None) -> None:
        """Give the node these inputs, but for those at the end that are left out."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        self.node.resize_inputs(len(given))
        for index, value in enumerate(given):
            self.node.replace_input_with(index, value)

    def become(self, output: int, value: ir.Value) -> None:
        """Give a value the name and the uses of one of the node's outputs."""
        old = self.node.outputs[output]
        value.shape = old.shape
        if old.dtype is not None:
            value.dtype = old.dtype
        name, old.name = old.name, value.name
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        value.name = name

    def behind(self, output: int, op_type: str, *inputs: ir.Value) -> None:
        """Append a node to one of the node's outputs; its output takes over the name and uses."""
        value, graph = self.node.outputs[output], self.node.graph
        new = ir.node(op_type, [value, *inputs], name=self._names.fresh("node", f"{self.node.name}/{op_type}"))
        new.outputs[0].name = self._names.fresh("value", f"{value.name}/{op_type}")
        self.become(output, new.outputs[0])
        new.replace_input_with(0, value)
        value.shape = None
        assert graph is not None
        graph.insert_after(self.node, new)

    def drop(self) -> None:
        """Remove the node, of which nothing is used any more."""
        assert self.node.graph is not None
        self.node.graph.remove(self.node, safe=True)

    def error(self, what: str, version: int) -> ModelError:
        return ModelError(
            f"{self.node.op_type} (node {self.node.name!r}): {what}; opset {version} has no equivalent; "
            "expected a model of a newer opset"
        )


# From 8 on


@_since(9, "BatchNormalization")
def _batch_normalization_9(place: _Place) -> None:
    """`spatial` = 0: every position has statistics of its own, as a channel has."""
    if place.take("spatial", 1):
        return
    node, x = place.node, place.x
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        raise place.error("it has spatial=0 in training mode", 9)
    shape = place.op("Shape", x)
    flat = place.constant([-1])
    place.inputs(place.op("Flatten", x, axis=1), *(place.op("Reshape", value, flat) for value in node.inputs[1:]))
    place.behind(0, "Reshape", shape)


@_since(14, "BatchNormalization")
def _batch_normalization_14(place: _Place) -> None:
    """More than one output was training mode. Two of them were for the gradient."""
    used = [bool(value.uses()) or value.is_graph_output() for value in place.node.outputs]
    if any(used[3:]):
        raise place.error("its saved statistics are read", 14)
    if len(used) > 1:
        place.node.resize_outputs(min(len(used), 3))
        place.set("training_mode", 1)


@_since(9, "Upsample")
def _upsample_9(place: _Place) -> None:
    place.inputs(place.x, place.constant(place.take("scales"), np.float32))


@_since(9, "Scan")
def _scan_9(place: _Place) -> None:
    raise place.error("it is of opset 8, with a batch axis", 9)


@_since(10, "Slice")
def _slice_10(place: _Place) -> None:
    names = ("starts", "ends", "axes")
    given = [place.take(name) for name in names]
    place.inputs(place.x, *(None if numbers is None else place.constant(numbers) for numbers in given))


@_since(10, "TopK")
def _top_k_10(place: _Place) -> None:
    place.inputs(place.x, place.constant([place.take("k")]))


@_since(10, "Dropout")
def _dropout_10(place: _Place) -> None:
    """The mask, which had the type of the input, became one of truth values."""
    if len(place.node.outputs) > 1 and (place.node.outputs[1].uses() or place.node.outputs[1].is_graph_output()):
        none = place.op("ConstantOfShape", place.op("Shape", place.x), value=ir.tensor(np.zeros(1, np.float32)))
        place.become(1, place.op("CastLike", none, place.x))
    place.node.resize_outputs(1)


@_since(12, "Dropout")
def _dropout_12(place: _Place) -> None:
    """Until then onnxruntime's mask of an inference was false throughout, since then it is true."""
    if len(place.node.outputs) > 1 and (place.node.outputs[1].uses() or place.node.outputs[1].is_graph_output()):
        none = place.op("ConstantOfShape", place.op("Shape", place.x), value=ir.tensor(np.zeros(1, np.bool_)))
        place.become(1, none)
    place.node.resize_outputs(1)
    place.inputs(place.x, place.constant(place.take("ratio", 0.5), np.float32))


# From 11 on


@_since(11, "Clip")
def _clip_11(place: _Place) -> None:
    bounds = [place.take(name) for name in ("min", "max")]
    place.inputs(place.x, *(None if bound is None else place.number(bound) for bound in bounds))


@_since(11, "Pad")
def _pad_11(place: _Place) -> None:
    pads, value = place.take("pads"), place.take("value", 0.0)
    place.inputs(place.x, place.constant(pads), place.number(value) if value else None)


@_since(11, "Scatter")
def _scatter_11(place: _Place) -> None:
    place.node.op_type = "ScatterElements"


@_since(11, "Upsample", "Resize")
def _resize_11(place: _Place) -> None:
    """Position k was k / scale, and the nearest one was below it where an axis grows, and above it where it shrinks."""
    node, scales = place.node, place.node.inputs[1]
    assert scales is not None
    mode = place.take("mode", "nearest")
    node.op_type = "Resize"
    place.set("mode", "linear" if mode == "bilinear" else mode)
    place.set(_COORDINATES, "asymmetric")
    place.inputs(place.x, None, scales)
    if mode != "nearest":
        return
    tensor = ir.convenience.get_const_tensor(scales)
    known = None if tensor is None or scales.is_graph_input() else tensor.numpy()
    grows, shrinks = (known is None or bool((sign * (known - 1) > 0).any()) for sign in (1, -1))
    if grows and shrinks:
        one = place.constant(1.0, np.float32)
        larger, scales = place.op("Max", scales, one), place.op("Min", scales, one)
        options = {"mode": "nearest", _COORDINATES: "asymmetric", "nearest_mode": "floor"}
        place.inputs(place.op("Resize", place.x, None, larger, **options), None, scales)
    place.set("nearest_mode", "ceil" if shrinks else "floor")


# From 13 on


@_since(13, "Squeeze", "Unsqueeze", "ReduceSum")
def _axes_13(place: _Place) -> None:
    axes = place.take("axes")
    place.inputs(place.x, place.constant(axes) if axes else None)


@_since(13, "Split")
def _split_13(place: _Place) -> None:
    sizes = place.take("split")
    place.inputs(place.x, place.constant(sizes) if sizes else None)


@_since(13, "Softmax", "LogSoftmax", "Hardmax")
def _softmax_13(place: _Place) -> None:
    """It was over all axes from `axis` on, together."""
    axis = place.take("axis", 1)
    rank = None if axis == _LAST else place.rank
    if axis == _LAST or (rank is not None and axis % max(rank, 1) == rank - 1):
        place.set("axis", _LAST)
        return
    rows = place.op("Flatten", place.x, axis=axis)
    of_rows = place.op(place.node.op_type, rows, axis=_LAST)
    place.become(0, place.op("Reshape", of_rows, place.op("Shape", place.x)))
    place.drop()


# From 16 on


@_since(16, "RoiAlign")
def _roi_align_16(place: _Place) -> None:
    if _COORDINATES not in place.node.attributes:
        place.set(_COORDINATES, "output_half_pixel")


@_since(18, *(f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod")))
@_since(18, "ReduceSumSquare")
def _axes_18(place: _Place) -> None:
    _axes_13(place)


@_since(18, "Split")
def _split_18(place: _Place) -> None:
    if len(place.node.inputs) < 2 or place.node.inputs[1] is None:
        place.set("num_outputs", len(place.node.outputs))


@_since(20, "GridSample")
def _grid_sample_20(place: _Place) -> None:
    mode = place.take("mode", "bilinear")
    place.set("mode", {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


@_since(20, "DFT")
def _dft_20(place: _Place) -> None:
    given: Sequence[ir.Value | None] = place.node.inputs
    length = given[1] if len(given) > 1 else None
    place.inputs(place.x, length, place.constant(place.take("axis", 1)))


@_since(21, "GroupNormalization")
def _group_normalization_21(place: _Place) -> None:
    """Scale and bias were of groups, and became those of channels."""
    groups = place.constant([place.node.attributes["num_groups"].as_int()])
    channels = place.op("Shape", place.x, start=1, end=2)
    each = place.op("Concat", groups, place.op("Div", channels, groups), axis=0)

    def of_channels() -> Iterator[ir.Value]:
        for value in place.node.inputs[1:]:
            column = place.op("Unsqueeze", value, place.constant([1]))
            yield place.op("Reshape", place.op("Expand", column, each), channels)

    place.inputs(place.x, *of_channels())
