"""Files that onnxruntime loads and onnx's checker refuses, and sparse tensors, which onnx_ir drops: in one spelling."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from gradfuse.errors import ModelError, one_line
from gradfuse.models import zeros
from gradfuse.models.tensors import PROTOBUF_LIMIT
from gradfuse.models.validation import is_external

_DEFAULT_DOMAIN = "ai.onnx"
"""The default domain's other name."""
_FIRST_WITH_CONSTANTS = 4
"""The first IR version in which an initializer need not be an input."""


def as_checked(model: onnx.ModelProto, source: str) -> onnx.ModelProto:
    """Return a model as onnx's checker takes it: itself, or a copy in which only the spelling is another.

    A graph without a name has one, nodes of "ai.onnx" are of "", a key of the metadata has its last value, outputs
    without a type have the one that follows, initializers need not be inputs in any IR version, and sparse initializers
    and constants are dense.

    Args:
        model: a model whose tensors have been checked.
        source: what to call it in messages.

    Raises:
        ModelError: a sparse tensor has elements elsewhere than its shape says or in another file, or is too large as a
            dense one.
    """
    if not _is_odd(model):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.name = copy.graph.name or "graph"
    last = {entry.key: entry.value for entry in copy.metadata_props}
    if len(last) < len(copy.metadata_props):
        del copy.metadata_props[:]
        for key, value in last.items():
            copy.metadata_props.add(key=key, value=value)
    if _has_constants_of_no_input(copy):
        copy.ir_version = _FIRST_WITH_CONSTANTS
    for node in _nodes(copy):
        if node.domain == _DEFAULT_DOMAIN:
            node.domain = ""
    _make_dense(copy, source)
    _give_types(copy)
    return copy


def without_maps(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose outputs are tensors where a ZipMap at the end makes maps of them; itself if none does.

    The converter of scikit-learn puts it there, for a map from class to probability for each row.
    """
    maps = {node.output[0]: node for node in model.graph.node if _is_zip_map(node)}
    if not any(value.name in maps for value in model.graph.output):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    outputs = list(copy.graph.output)
    known = {value.name: value for value in (*copy.graph.value_info, *outputs)}
    del copy.graph.output[:]
    for value in outputs:
        name = value.name if value.name not in maps else maps[value.name].input[0]
        if name not in known:
            known[name] = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        copy.graph.output.append(known[name])
    nodes = [node for node in copy.graph.node if not _is_zip_map(node)]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def refuse_maps(model: onnx.ModelProto, source: str) -> None:
    """Raise ModelError if an output is a sequence of maps, which onnx_ir does not know."""
    for value in model.graph.output:
        if value.type.sequence_type.elem_type.HasField("map_type") or value.type.HasField("map_type"):
            raise ModelError(
                f"{source}: output {value.name!r} is of maps; expected tensors, as skl2onnx gives with "
                "options={'zipmap': False}"
            )


def _is_zip_map(node: onnx.NodeProto) -> bool:
    return bool(node.op_type == "ZipMap" and node.domain == "ai.onnx.ml")


def _is_odd(model: onnx.ModelProto) -> bool:
    graph, keys = model.graph, [entry.key for entry in model.metadata_props]
    return (
        not graph.name
        or len(set(keys)) < len(keys)
        or _has_constants_of_no_input(model)
        or any(not value.HasField("type") for value in graph.output)
        or any(one.sparse_initializer for one in _graphs(model))
        or any(node.domain == _DEFAULT_DOMAIN or _sparse_of(node) is not None for node in _nodes(model))
    )


def _has_constants_of_no_input(model: onnx.ModelProto) -> bool:
    if model.ir_version >= _FIRST_WITH_CONSTANTS:
        return False
    return not {tensor.name for tensor in model.graph.initializer} <= {value.name for value in model.graph.input}


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in _graphs(model):
        yield from graph.node
    for function in model.functions:
        yield from function.node


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph of a model, and those within its nodes and functions."""
    pending = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while pending or nodes:
        if pending:
            graph = pending.pop()
            yield graph
            nodes.extend(graph.node)
        for node in nodes:
            for attribute in node.attribute:
                pending += [attribute.g] if attribute.HasField("g") else []
                pending += attribute.graphs
        nodes.clear()


def _sparse_of(node: onnx.NodeProto) -> onnx.SparseTensorProto | None:
    """Return the value of a constant that is sparse."""
    if node.op_type != "Constant" or len(node.attribute) != 1 or node.attribute[0].name != "sparse_value":
        return None
    return node.attribute[0].sparse_tensor if node.attribute[0].HasField("sparse_tensor") else None


def _make_dense(model: onnx.ModelProto, source: str) -> None:
    defaults = {tensor.name for tensor in zeros.of(model.graph)}
    for graph in _graphs(model):
        kept = []
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            if graph is model.graph and name in defaults:
                kept.append(sparse)
            else:
                graph.initializer.append(_dense(sparse, name, f"{source}: initializer {name!r}"))
        if len(kept) < len(graph.sparse_initializer):
            del graph.sparse_initializer[:]
            graph.sparse_initializer.extend(kept)
    for node in _nodes(model):
        sparse = _sparse_of(node)
        if sparse is not None:
            where = f"{source}: Constant (node {node.name or ', '.join(node.output)!r}): sparse_value"
            value = onnx.helper.make_attribute("value", _dense(sparse, sparse.values.name, where))
            node.attribute[0].CopyFrom(value)


def _dense(sparse: onnx.SparseTensorProto, name: str, where: str) -> onnx.TensorProto:
    if is_external(sparse.values) or is_external(sparse.indices):
        raise ModelError(f"{where} is sparse, with its elements in another file; expected them in the model")
    try:
        values, places = map(numpy_helper.to_array, (sparse.values, sparse.indices))
    except Exception as error:
        # numpy_helper raises in many ways what is no array.
        raise ModelError(f"{where} cannot be read: {one_line(error)}") from error
    dims, size = tuple(sparse.dims), math.prod(sparse.dims)
    if min(dims, default=1) < 0 or size * values.itemsize > PROTOBUF_LIMIT:
        raise ModelError(f"{where} is sparse, of shape {list(dims)}; expected one that a dense tensor may have")
    if places.ndim == 2 and places.shape[1] == len(dims) and np.all((places >= 0) & (places < np.array(dims))):
        places = np.ravel_multi_index(tuple(places.T), dims)
    flat = np.zeros(size, values.dtype)
    is_right = places.ndim == 1 and values.ndim == 1 and len(places) == len(values) and places.dtype.kind == "i"
    if not is_right or (len(places) and not (places.min() >= 0 and places.max() < size)):
        raise ModelError(f"{where} is sparse, with elements elsewhere than in its shape {list(dims)}")
    flat[places] = values
    dense = numpy_helper.from_array(flat.reshape(dims), name)
    # Of types that numpy has no name for.
    dense.data_type = sparse.values.data_type
    return dense


def _give_types(model: onnx.ModelProto) -> None:
    """Give outputs without a type the one that onnx infers, if it does."""
    without = [value for value in model.graph.output if not value.HasField("type")]
    if not without:
        return
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:
        # What is wrong with the model is the checker's to say.
        return
    known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.output, *model.graph.input)}
    for value in without:
        if value.name in known and known[value.name].HasField("type"):
            value.type.CopyFrom(known[value.name].type)
