"""Validates a model before any of its tensors is read: what onnx's checker asks for, and what it does not.

Tensors are validated at any depth: initializers, attributes, sparse ones, those of subgraphs and of functions.
"""

from __future__ import annotations

import graphlib
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

import onnx
import onnx_ir as ir

from gradfuse.errors import ModelError

MOST_INLINED = 10_000
"""Nodes that calls of functions may amount to in a model of any size..."""
MOST_INLINED_SHARE = 100
"""...and, in larger models, for each node that is written. What is more is made to exhaust whoever reads it."""

HIGHEST_RANK = 32
"""How many dimensions arrays may have in every version of numpy."""

# What onnxruntime-training puts into the default domain.
_TRAINING_OPS = ("AveragePoolGrad", "MaxPoolGrad", "SimplifiedLayerNormalization")
_LATER_DOMAIN = "gradfuse.later"
"""Where the operators of later opsets are for the checker, which asks nothing of domains that it does not know."""

_FIELDS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float_data",
    onnx.TensorProto.COMPLEX64: "float_data",
    onnx.TensorProto.DOUBLE: "double_data",
    onnx.TensorProto.COMPLEX128: "double_data",
    onnx.TensorProto.INT64: "int64_data",
    onnx.TensorProto.UINT32: "uint64_data",
    onnx.TensorProto.UINT64: "uint64_data",
    onnx.TensorProto.STRING: "string_data",
}
"""Where the elements are that are not bytes; those of all other types are in int32_data."""
_COMPLEX = (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
_TYPES = {int(dtype) for dtype in ir.DataType} - {onnx.TensorProto.UNDEFINED}
_Message = TypeVar("_Message", onnx.ModelProto, onnx.GraphProto)
_LARGE = 2**20
"""Bytes from which on an initializer is left out for onnx's checker."""
_NUMBER = re.compile(r"[0-9]{1,19}")


def check_calls(model: ir.Model, source: str) -> None:
    """Refuse functions that call themselves or amount to too many nodes, and references to attributes in no function.

    Raises:
        ModelError: naming the function or the node.
    """
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.is_ref():
                name = node.name or ", ".join(str(value.name) for value in node.outputs)
                where = f"{node.op_type} (node {name!r})"
                reference = f"a reference to attribute {attribute.ref_attr_name!r} of a function"
                raise ModelError(f"{source}: {where}: {attribute.name} is {reference}; expected a value")
    for domain, name, _ in model.functions:
        if not domain:
            # onnx_ir writes no empty domain, which onnx's checker asks for.
            raise ModelError(f"{source}: function {name!r} has the default domain; expected one of its own")
    own, written = inlined_nodes(model, source)
    most = max(MOST_INLINED, MOST_INLINED_SHARE * written)
    if own > most:
        raise ModelError(
            f"{source}: its functions amount to {_short(own)} nodes where they are called, from {written} that are "
            f"written; expected at most {most}"
        )


def inlined_nodes(model: ir.Model, source: str) -> tuple[int, int]:
    """Return how many nodes a model has once all functions are put in the place of their calls, and how many as it is.

    Raises:
        ModelError: a function calls itself.
    """
    nodes = {key: list(function.all_nodes()) for key, function in model.functions.items()}
    calls = {key: Counter(n.op_identifier() for n in own if n.op_identifier() in nodes) for key, own in nodes.items()}
    try:
        order = list(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as error:
        names = " calls ".join(f"{domain}::{name}" for domain, name, _ in reversed(error.args[1]))
        raise ModelError(f"{source}: is not a valid ONNX model: the function {names}") from error
    sizes: dict[ir.OperatorIdentifier, int] = {}
    for key in order:
        inner = sum(count * sizes[callee] for callee, count in calls[key].items())
        sizes[key] = len(nodes[key]) - calls[key].total() + inner
    own, written = 0, sum(map(len, nodes.values()))
    for node in model.graph.all_nodes():
        own += sizes.get(node.op_identifier(), 1)
        written += 1
    return own, written


def _short(number: int) -> str:
    return str(number) if number < 10**15 else f"more than {10**15}"


def tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield every tensor of a model, with what to call it; of subgraphs and functions too."""
    for where, tensor in _all_tensors(model):
        if isinstance(tensor, onnx.SparseTensorProto):
            yield f"{where}: values", tensor.values
            yield f"{where}: indices", tensor.indices
        else:
            yield where, tensor


def refuse_sparse(model: onnx.ModelProto, source: str, known: Collection[str] = ()) -> None:
    """Raise ModelError where any tensor of a model is sparse: onnx_ir drops those without a word.

    Args:
        model: the model.
        source: what to call it.
        known: initializers of its graph that may be.
    """
    seen = set()
    for where, tensor in _all_tensors(model):
        if isinstance(tensor, onnx.SparseTensorProto):
            name = tensor.values.name
            if where == f"initializer {name!r}" and name in known and name not in seen:
                # The main graph comes first.
                seen.add(name)
                continue
            is_initializer = where.startswith("initializer ")
            what = "sparse; expected dense ones only" if is_initializer else "a sparse tensor; expected a dense one"
            raise ModelError(f"{source}: {where} is {what}")


def _all_tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto | onnx.SparseTensorProto]]:
    graphs = [model.graph]
    nodes: list[tuple[str, Iterable[onnx.AttributeProto]]] = []
    for function in model.functions:
        nodes.append((f"function {function.name!r}", function.attribute_proto))
        nodes += [(_called(node), node.attribute) for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            for tensor in graph.initializer:
                yield f"initializer {tensor.name!r}", tensor
            for sparse in graph.sparse_initializer:
                yield f"initializer {sparse.values.name!r}", sparse
            nodes += [(_called(node), node.attribute) for node in graph.node if node.attribute]
            continue
        where, attributes = nodes.pop()
        for attribute in attributes:
            # Whatever its type says that it holds.
            found = [*attribute.tensors, *attribute.sparse_tensors]
            found += [attribute.t] if attribute.HasField("t") else []
            found += [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
            for tensor in found:
                yield f"{where}: {attribute.name}", tensor
            graphs += [attribute.g] if attribute.HasField("g") else []
            graphs += attribute.graphs


def is_external(tensor: onnx.TensorProto) -> bool:
    """Tell whether a tensor's elements are in a file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def external_locations(model: onnx.ModelProto) -> set[str]:
    """Return the files that the external tensors of a model are in, relative to the model's folder."""
    entries = (entry for _, tensor in tensors(model) if is_external(tensor) for entry in tensor.external_data)
    return {os.path.normpath(entry.value) for entry in entries if entry.key == "location"}


def check_tensors(model: onnx.ModelProto, source: str, folder: str | None) -> None:
    """Refuse tensors that have too few or too many elements, or have them in a file that is none of the model's.

    External data is in regular files of the model's folder, or of folders in it: no absolute paths, nothing outside by
    `..` or links, and no file that is a symbolic link or has several hard links. It is not read.

    Args:
        model: the model.
        source: what to call it in messages.
        folder: the folder of the model; None where it is not known, so that files are not looked at.

    Raises:
        ModelError: naming the tensor.
    """
    for where, tensor in tensors(model):
        try:
            _check_tensor(tensor, where, folder)
        except ValueError as error:
            raise ModelError(f"{source}: {error}") from error


def check_structure(model: onnx.ModelProto, path: str | None) -> None:
    """Run onnx's checker, which here takes operators of later opsets than the model's: onnxruntime's fusions put
    LayerNormalization into older models, and onnxruntime-training operators of its own. It takes outputs without a
    shape too, and the GroupNormalization of opsets 18 to 20, as onnxruntime does.

    Args:
        model: the model.
        path: a file of binary protobuf that it was read from; None where there is none.

    Raises:
        Exception: as `onnx.checker.check_model`: ValidationError, and for some models ValueError or RuntimeError.
    """
    try:
        has_large = any(map(_is_large, model.graph.initializer))
        onnx.checker.check_model(path if path and not has_large else _without_external_data(model))
    except Exception as error:
        if not any(what in str(error) for what in ("No Op registered for", "is deprecated", "Field 'shape'")):
            raise
        changed = _without_external_data(model)
        if changed is model:
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
        is_moved, is_shaped = _move_later_operators(changed), _give_outputs_shapes(changed)
        if not is_moved and not is_shaped:
            raise
        onnx.checker.check_model(changed)


def further_faults(model: onnx.ModelProto, first: str) -> list[str]:
    """Return what else is wrong with nodes of a model's graph than the first fault, at which onnx's checker stops."""
    context = type(onnx.checker.DEFAULT_CONTEXT)()
    context.ir_version = model.ir_version
    context.opset_imports = {entry.domain: entry.version for entry in model.opset_import}
    version = _default_version(model.opset_import, 1)
    functions = {(function.domain, function.name) for function in model.functions}
    graph = model.graph
    known = {value.name for holder in (graph.input, graph.initializer) for value in holder}
    known |= {sparse.values.name for sparse in graph.sparse_initializer}
    known |= {name for node in graph.node for name in node.output} | {""}
    found = []
    for node in graph.node:
        texts = [f"input {name!r} of node" for name in node.input if name not in known]
        has_graphs = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
        if not has_graphs and (node.domain, node.op_type) not in functions and not _is_later(node, version):
            try:
                onnx.checker.check_node(node, context)
            except Exception as error:  # As of `check_structure`.
                texts.append(str(error).rstrip("."))
        found += [(text, f"{_called(node)}: {text.replace(' of node', ' is given by no node')}") for text in texts]
    own = next((index for index, (text, _) in enumerate(found) if text in first), None)
    return [shown for index, (_, shown) in enumerate(found) if index != own]


def _give_outputs_shapes(model: onnx.ModelProto) -> bool:
    """Give outputs a shape that have a type and none; tell whether there are any."""
    without = [
        value.type.tensor_type
        for value in model.graph.output
        if value.type.WhichOneof("value") == "tensor_type" and not value.type.tensor_type.HasField("shape")
    ]
    for tensor_type in without:
        tensor_type.shape.SetInParent()
    return bool(without)


def _without_external_data(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose external tensors are empty, as the checker would look for them in the current folder.

    So are large initializers, of which the checker would make two copies, and has nothing to say.
    """
    if not any(is_external(tensor) or _is_large(tensor) for _, tensor in tensors(model)):
        return model
    copy = _copied(model, "graph")
    copy.graph.CopyFrom(_copied(model.graph, "initializer"))
    for tensor in model.graph.initializer:
        if _is_large(tensor):
            copy.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=[0])
        else:
            copy.graph.initializer.append(tensor)
    for _, tensor in tensors(copy):
        if is_external(tensor):
            del tensor.dims[:], tensor.external_data[:]
            tensor.ClearField("data_location")
            tensor.dims.append(0)
    return copy


def _is_large(tensor: onnx.TensorProto) -> bool:
    return int(tensor.ByteSize()) >= _LARGE


def _copied(message: _Message, left_out: str) -> _Message:
    """Return a copy of a message without one of its fields."""
    copy = type(message)()
    for field, value in message.ListFields():
        if field.name == left_out:
            continue
        if isinstance(value, (str, bytes, int, float)):
            setattr(copy, field.name, value)
        elif hasattr(value, "CopyFrom"):
            getattr(copy, field.name).CopyFrom(value)
        else:
            getattr(copy, field.name).extend(value)
    return copy


def _move_later_operators(model: onnx.ModelProto) -> bool:
    """Put operators of later opsets, and deprecated ones, into a domain of their own; tell whether there are any."""
    own = _default_version(model.opset_import, 1)
    found = False
    for holder, nodes, version in (
        (model, model.graph.node, own),
        *((f, f.node, _default_version(f.opset_import, own)) for f in model.functions),
    ):
        later = [node for node in _every_node(nodes) if _is_later(node, version)]
        for node in later:
            node.domain = _LATER_DOMAIN
        if later:
            found = True
            holder.opset_import.add(domain=_LATER_DOMAIN, version=1)
    return found


def _default_version(imports: Iterable[onnx.OperatorSetIdProto], otherwise: int) -> int:
    return next((int(entry.version) for entry in imports if entry.domain in ("", "ai.onnx")), otherwise)


def _every_node(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        for attribute in node.attribute:
            pending += attribute.g.node
            for graph in attribute.graphs:
                pending += graph.node


def _is_later(node: onnx.NodeProto, version: int) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return False
    if onnx.defs.has(node.op_type, version):
        return node.op_type == "GroupNormalization" and onnx.defs.get_schema(node.op_type, version).deprecated
    return onnx.defs.has(node.op_type) or node.op_type in _TRAINING_OPS


def _called(node: onnx.NodeProto) -> str:
    # What is no UTF-8 is given as bytes.
    return f"{node.op_type} (node {node.name or ', '.join(map(str, node.output))!r})"


def _check_tensor(tensor: onnx.TensorProto, where: str, folder: str | None) -> None:
    """Raise ValueError with what is wrong with a tensor."""
    dims = list(tensor.dims)
    if any(dim < 0 for dim in dims):
        raise ValueError(f"{where} has the dimensions {dims}; expected none below 0")
    if len(dims) > HIGHEST_RANK:
        raise ValueError(f"{where} has {len(dims)} dimensions; expected at most {HIGHEST_RANK}")
    if tensor.data_type not in _TYPES:
        raise ValueError(f"{where} has the type {tensor.data_type}; expected one of ONNX's")
    dtype = ir.DataType(tensor.data_type)
    count = math.prod(dims)
    is_string = dtype == ir.DataType.STRING
    in_bytes = 0 if is_string else (count * int(8 * dtype.itemsize) + 7) // 8
    if is_external(tensor):
        if is_string:
            raise ValueError(f"{where} has strings as external data; expected them in the model")
        _check_external(tensor, in_bytes, folder)
        return
    if tensor.HasField("raw_data") and not is_string:
        size, needed, unit = len(tensor.raw_data), in_bytes, "bytes"
    else:
        size, unit = len(getattr(tensor, _FIELDS.get(tensor.data_type, "int32_data"))), "elements of data"
        # Elements of less than a byte are packed.
        needed = count if is_string or dtype.itemsize >= 1 else in_bytes
        needed *= 2 if tensor.data_type in _COMPLEX else 1
    if size != needed:
        raise ValueError(f"{where} has {size} {unit}; expected {needed} for the dimensions {dims}")


def _check_external(tensor: onnx.TensorProto, needed: int, folder: str | None) -> None:
    what = f"the external data of {tensor.name!r}"
    keys = [entry.key for entry in tensor.external_data]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"{what} has two entries {twice!r}; expected one")
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not location or "\0" in location:
        raise ValueError(f"{what} has location {location!r}; expected the path of a file")
    for key in ("offset", "length"):
        if _NUMBER.fullmatch(entries.get(key, "0")) is None:
            raise ValueError(f"{what} has {key} {entries[key][:40]!r}; expected a number of bytes")
    if int(entries.get("length", needed)) != needed:
        raise ValueError(f"{what} has length {entries['length']}; expected {needed}")
    if os.path.isabs(location) or os.path.normpath(location).split(os.sep, 1)[0] == os.pardir:
        raise ValueError(f"{what} is in {location}; expected a file in the model's folder")
    if folder is not None:
        _check_file(tensor.name, os.path.join(folder, location), folder, int(entries.get("offset", 0)) + needed)


def _check_file(name: str, path: str, folder: str, needed: int) -> None:
    what = f"the external data of {name!r} is in {path}, which"
    try:
        status = os.lstat(path)
    except OSError as error:
        fault = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise ValueError(f"{what} {fault}") from error
    if stat.S_ISLNK(status.st_mode):
        raise ValueError(f"{what} is a symbolic link; expected a regular file")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{what} is no regular file; expected one")
    within = os.path.realpath(folder)
    if os.path.commonpath([within, os.path.realpath(path)]) != within:
        raise ValueError(f"{what} is outside the model's folder; expected a file in it")
    if status.st_nlink > 1:
        raise ValueError(f"{what} has several hard links; expected one")
    if status.st_size < needed:
        raise ValueError(f"the external data file {path} has {status.st_size} bytes; expected {needed} for {name!r}")
