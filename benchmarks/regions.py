"""Cuts the subgraph that a fusion replaces out of a training graph, and makes it larger.

A corpus graph has dimensions of a handful. What it would cost at a real size is a question about the shape of its
backward subgraph, not about these numbers, so :func:`extract` takes the subgraph with the elementwise part of the
forward pass ahead of it (up to the next matrix product, convolution or input), and :func:`enlarge` gives it other
dimensions: each old dimension has one new one, flattened dimensions follow their parts through `Reshape`, and so do
the constants that hold dimensions (shapes, ends of slices, 1 / N). A constant that was missed shows: the enlarged graph
then no longer has the form of the operator, and is reported as not covered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

Array = np.ndarray[Any, Any]

# Where the cone towards the inputs ends: what is no part of a loss or of an attention's softmax.
CUT = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LayerNormalization", "Gelu", "Relu", "Dropout"}
_SHAPE_READERS = {
    *("Reshape", "Expand", "ConstantOfShape", "Concat", "Slice", "OneHot", "Range", "Split", "Mul", "Div", "Tile"),
    *("Squeeze", "Cast", "Identity", "Where"),
}
_SHAPED = {"Reshape", "Expand", "ConstantOfShape"}
_AXES = {
    *((op, 1) for op in ("Squeeze", "Unsqueeze", "Tile", "ReduceSum", "ReduceMean", "ReduceMax")),
    *(("Slice", k) for k in (3, 4)),
}


class NotCovered(Exception):
    """The tool cannot enlarge this graph; the text says why."""


@dataclass(frozen=True)
class Region:
    """A subgraph as a model of its own: inputs at the cut with sample values, and every live value as an output."""

    model: onnx.ModelProto
    samples: dict[str, Array]
    shapes: dict[str, tuple[int, ...]]


def session(model: onnx.ModelProto, threads: int = 1, *, library: bool = False) -> ort.InferenceSession:
    """A session of stock onnxruntime, with gradfuse's kernels if wanted."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    # Threads that wait in a loop would take the cores from the other session.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if library:
        import gradfuse

        gradfuse.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto, feeds: Mapping[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
    """Values of a model, also ones that are none of its outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    made = {o for n in copy.graph.node for o in n.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=w) for w in wanted if w in made)
    given = {i.name for i in copy.graph.initializer}
    results: dict[str, Array] = {w: numpy_helper.to_array(t) for t in copy.graph.initializer for w in [t.name]}
    results = {name: value for name, value in results.items() if name in wanted}
    if copy.graph.output:
        # One thread: with more, onnxruntime's ScatterND with reduction "add" loses terms where indices repeat.
        s = session(copy, 1)
        names = [i.name for i in s.get_inputs()]
        outputs = s.run(None, {n: feeds[n] for n in names})
        results |= dict(zip([o.name for o in s.get_outputs()], outputs, strict=True))
    return {w: feeds[w] for w in wanted if w in feeds and w not in given} | results


def extract(model: onnx.ModelProto, feeds: Mapping[str, Array], replaced: Iterable[str], also: Iterable[str]) -> Region:
    """The nodes of these names and the elementwise part of the graph ahead of them.

    Args:
        model: a graph whose nodes all have names.
        feeds: its sample inputs.
        replaced: names of nodes that a fusion replaces.
        also: names of further values that the fused operator reads.
    """
    graph = model.graph
    producer = {out: n for n in graph.node for out in n.output if out}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    constants = {t.name for t in graph.initializer}
    wanted = set(replaced)
    kept: dict[str, onnx.NodeProto] = {n.name: n for n in graph.node if n.name in wanted}
    todo = [name for n in kept.values() for name in n.input] + [v for v in also if v in producer]
    cut: dict[str, None] = {}
    while todo:
        name = todo.pop()
        source = producer.get(name)
        if name in constants or not name:
            continue
        if source is None or (source.op_type in CUT and source.name not in wanted):
            cut[name] = None
        elif source.name not in kept:
            if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in source.attribute):
                raise NotCovered(f"a {source.op_type} ahead of the subgraph")
            kept[source.name] = source
            todo += source.input
    nodes = [n for n in graph.node if n.name in kept]
    final = {o.name for o in graph.output}
    live = [
        out
        for n in nodes
        for out in n.output
        if out and (out in final or any(r.name not in kept for r in readers.get(out, ())))
    ]
    used = {name for n in nodes for name in n.input}
    inner = [out for n in nodes for out in n.output if out]
    values = run(model, feeds, [*cut, *inner])
    infos = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
    shapes = {name: tuple(np.shape(v)) for name, v in values.items()}

    def info(name: str) -> onnx.ValueInfoProto:
        known: onnx.ValueInfoProto | None = infos.get(name)
        if known is not None and known.type.tensor_type.HasField("shape"):
            return known
        kind = helper.np_dtype_to_tensor_dtype(values[name].dtype)
        return helper.make_tensor_value_info(name, kind, shapes[name])

    tensors = [t for t in graph.initializer if t.name in used]
    shapes |= {t.name: tuple(t.dims) for t in tensors}
    small = helper.make_graph(nodes, "region", [info(c) for c in cut], [info(name) for name in live], tensors)
    small.value_info.extend(infos[name] for name in inner if name in infos and name not in live)
    result = helper.make_model(small, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    result.functions.extend(model.functions)
    return Region(result, {name: values[name] for name in cut}, shapes)


class _Dims:
    """The new dimension for each old one."""

    def __init__(self, region: Region, composites: Mapping[int, tuple[int, ...]]) -> None:
        self.region = region
        self.composites = composites
        self.new: dict[int, int] = {}

    def parts(self, dim: int) -> tuple[int, ...]:
        found = self.composites.get(dim)
        return (dim,) if found is None else tuple(p for f in found for p in self.parts(f))

    def __call__(self, dim: int) -> int:
        if dim in self.new:
            return self.new[dim]
        return math.prod(self.new.get(p, p) for p in self.parts(dim)) if dim in self.composites else dim


def enlarge(region: Region, largest: str, elements: int, keep: Iterable[int] = ()) -> tuple[Region, dict[int, int]]:
    """The region with its value `largest` scaled to about `elements` elements, and the new dimension of each old one.

    Dimensions grow by whole factors, those of the last two axes of a value of rank 3 or more to 1024 at most.

    Args:
        region: what to enlarge.
        largest: the value that decides.
        elements: how many it is to have.
        keep: dimensions that do not grow, as the number of groups.

    Raises:
        NotCovered: no dimension may grow.
    """
    dims = _Dims(region, _composites(region))
    fixed = {1, *keep}
    axes = [p for d in region.shapes[largest] for p in dims.parts(d) if p not in fixed]
    if not axes:
        raise NotCovered(f"no dimension of {region.shapes[largest]} may grow")
    factors = _factors(axes, elements / math.prod(region.shapes[largest]))
    dims.new = {d: d * k for d, k in factors.items()}
    model = onnx.ModelProto()
    model.CopyFrom(region.model)
    shapes = {name: tuple(dims(d) for d in shape) for name, shape in region.shapes.items()}
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value"):
                dim.dim_value = dims(dim.dim_value)
    _constants(model, dims)
    samples = {name: _tiled(value, shapes[name], dims) for name, value in region.samples.items()}
    return Region(model, samples, shapes), dims.new


def _composites(region: Region) -> dict[int, tuple[int, ...]]:
    """Dimensions that a reshape makes of several others."""
    found: dict[int, tuple[int, ...]] = {}
    for node in region.model.graph.node:
        if node.op_type != "Reshape" or node.input[0] not in region.shapes or node.output[0] not in region.shapes:
            continue
        first, second = (list(region.shapes[name]) for name in (node.input[0], node.output[0]))
        i = j = 0
        while i < len(first) and j < len(second):
            left, right = [first[i]], [second[j]]
            i, j = i + 1, j + 1
            while math.prod(left) != math.prod(right):
                if math.prod(left) < math.prod(right) and i < len(first):
                    left.append(first[i])
                    i += 1
                elif j < len(second):
                    right.append(second[j])
                    j += 1
                else:
                    break
            parts, wholes = ([d for d in side if d != 1] for side in (left, right))
            if len(parts) == 1 and len(wholes) > 1:
                parts, wholes = wholes, parts
            if len(wholes) == 1 and len(parts) > 1:
                found.setdefault(wholes[0], tuple(parts))
    return found


def _factors(axes: Sequence[int], growth: float) -> dict[int, int]:
    factors = dict.fromkeys(axes, 1)
    cap = 1024 if len(axes) > 2 else None

    def grow(chosen: Sequence[int], left: float) -> float:
        for dim in dict.fromkeys(chosen):
            count = sum(axes.count(d) for d in dict.fromkeys(chosen) if factors[d] == 1)
            k = max(1, round(left ** (1 / count)))
            if cap is not None:
                k = max(1, min(k, cap // dim))
            factors[dim] = k
            left /= k ** axes.count(dim)
        return left

    left = grow(axes[-2:], growth) if len(axes) > 2 else growth
    rest = [a for a in axes if factors[a] == 1]
    if rest and left >= 2:
        grow(rest[::-1], left)
    return factors


def _constants(model: onnx.ModelProto, dims: _Dims) -> None:
    reads: dict[str, list[tuple[str, int]]] = {}
    for node in model.graph.node:
        for k, name in enumerate(node.input):
            reads.setdefault(name, []).append((node.op_type, k))
    sliced = {name: node.input[0] for node in model.graph.node if node.op_type == "Slice" for name in node.input[1:3]}
    total = {math.prod(s) for s in dims.region.shapes.values()}

    def changed(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
        array = numpy_helper.to_array(tensor)
        uses = reads.get(name, [])
        new: Array
        if array.size > 1 and array.dtype.kind in "iu" and _is_range(array) and not _AXES & set(uses):
            length = max(dims(d) for d in array.shape)
            new = np.arange(length).reshape([dims(d) for d in array.shape]).astype(array.dtype)
        elif array.ndim <= 1 and array.dtype.kind in "iu":
            if not any(op in _SHAPE_READERS and (op, k) not in _AXES for op, k in uses):
                return tensor
            if name in sliced:
                new = _slice_ends(array, dims.region.shapes[sliced[name]], dims)
            elif ("Split", 1) in uses:
                new = array * (dims(int(array.sum())) // int(array.sum()))
            elif array.ndim == 1 and array.size > 1 and not {op for op, _ in uses} & _SHAPED and _is_ends(array, dims):
                new = array * (dims(int(array[-1])) // int(array[-1]))
            else:
                new = np.asarray([dims(int(n)) if n > 1 else n for n in array.ravel()], array.dtype)
                new = new.reshape(array.shape)
        elif array.dtype.kind == "f":
            if array.size and (array == array.flat[0]).all():
                value = _scalar(float(array.flat[0]), total, dims)
                new = np.full([dims(d) for d in array.shape], value, array.dtype)
            else:
                new = _tiled(array, [dims(d) for d in array.shape], dims)
        else:
            new = _tiled(array, [dims(d) for d in array.shape], dims)
        return numpy_helper.from_array(np.array(new, order="C"), tensor.name)

    for tensor in model.graph.initializer:
        tensor.CopyFrom(changed(tensor, tensor.name))
    for node in model.graph.node:
        if node.op_type != "Constant":
            continue
        (attribute,) = node.attribute
        if attribute.type == onnx.AttributeProto.TENSOR:
            attribute.t.CopyFrom(changed(attribute.t, node.output[0]))
        elif attribute.type in (onnx.AttributeProto.INT, onnx.AttributeProto.INTS):
            array = np.asarray(helper.get_attribute_value(attribute), np.int64)
            value = changed(numpy_helper.from_array(array), node.output[0])
            node.attribute[0].CopyFrom(helper.make_attribute("value", value))
        elif attribute.type in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS):
            array = np.asarray(helper.get_attribute_value(attribute), np.float32)
            value = changed(numpy_helper.from_array(array), node.output[0])
            node.attribute[0].CopyFrom(helper.make_attribute("value", value))


def _is_range(array: Array) -> bool:
    return max(array.shape, default=0) == array.size and np.array_equal(array.ravel(), np.arange(array.size))


def _is_ends(array: Array, dims: _Dims) -> bool:
    return bool((np.diff(array) >= 0).all()) and array[0] > 1 and dims.new.get(int(array[-1]), 0) > array[-1]


def _slice_ends(array: Array, shape: Sequence[int], dims: _Dims) -> Array:
    """Ends of slices, which cut a grown dimension at the same part of it."""

    def moved(n: int) -> int:
        for dim in shape:
            if 0 < n <= dim and dims(dim) != dim:
                return n * (dims(dim) // dim)
        return n

    return np.asarray([moved(int(n)) for n in array.ravel()], array.dtype).reshape(array.shape)


def _scalar(value: float, totals: Iterable[int], dims: _Dims) -> float:
    """The constant for the new dimensions, where it is a small number over a count of elements."""
    grown = [d for d in dims.new if dims.new[d] != d] + list(dims.composites)
    counts = {t: _count(t, dims) for t in totals} | {d: dims(d) for d in grown}
    if value == 0.0 or not math.isfinite(value) or abs(value) >= 1.0 or abs(value) in (0.5, 0.25):
        return value
    for numerator in (1.0, 2.0, 0.1, 0.9):
        for old, new in sorted(counts.items(), reverse=True):
            if new is not None and old > 1 and math.isclose(abs(value), numerator / old, rel_tol=1e-3):
                return math.copysign(numerator / new, value)
    return value


def _count(total: int, dims: _Dims) -> int | None:
    for shape in dims.region.shapes.values():
        if math.prod(shape) == total:
            return math.prod(dims(d) for d in shape)
    return None


def _tiled(array: Array, shape: Sequence[int], dims: _Dims) -> Array:
    """The array repeated along each axis until it has the shape; ends of groups move with the rows they count."""
    if array.ndim == 1 and array.size > 1 and array.dtype.kind in "iu" and _is_ends(array, dims):
        return np.asarray(array * (dims(int(array[-1])) // int(array[-1])))
    for axis, size in enumerate(shape):
        if array.shape[axis] != size:
            array = np.take(array, np.arange(size) % array.shape[axis], axis)
    return np.array(array, order="C")


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float64 in the place of float32 and float16."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)

    def widen(tensor: onnx.TensorProto) -> None:
        if tensor.data_type in floats:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))

    for value in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        if value.type.tensor_type.elem_type in floats:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for tensor in copy.graph.initializer:
        widen(tensor)
    for node in copy.graph.node:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                widen(attribute.t)
            elif attribute.name == "to" and attribute.i in floats:
                attribute.i = onnx.TensorProto.DOUBLE
            elif attribute.name == "value_float":
                value = numpy_helper.from_array(np.asarray(attribute.f, np.float64))
                attribute.CopyFrom(helper.make_attribute("value", value))
    return copy


def tensor_type(array: Array) -> int:
    """The onnx element type of an array."""
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def between(
    model: onnx.ModelProto, names: Iterable[str], outputs: Sequence[str], values: Mapping[str, Array]
) -> onnx.ModelProto:
    """The nodes of these names as a model; what they read from outside becomes its inputs, of the values' shapes."""
    chosen = set(names)
    nodes = [n for n in model.graph.node if n.name in chosen]
    made = {out for n in nodes for out in n.output}
    constants = {t.name: t for t in model.graph.initializer}
    read = dict.fromkeys(name for n in nodes for name in n.input if name and name not in made)
    inputs = [
        helper.make_tensor_value_info(name, tensor_type(values[name]), values[name].shape)
        for name in read
        if name not in constants
    ]
    graph = helper.make_graph(
        nodes,
        "part",
        inputs,
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [constants[r] for r in read if r in constants],
    )
    result = helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    result.functions.extend(model.functions)
    return result
