"""The tensors of a model: how large they are, whether they lie in files, and copies of a model with them in memory.

External data is read only where it is needed. Until then, tensors in files stay memory maps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from copy import copy, deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from gradfuse.errors import ModelError, one_line
from gradfuse.models import zeros
from gradfuse.models.zeros import Zeros

PROTOBUF_LIMIT = 2**31 - 1
# Room for everything of a message that is not tensor data.
_MESSAGE_ROOM = 2**27
_MAPPED = 2**20
"""Bytes from which on an external tensor is worth a place of its own in a file."""
_MUCH = 2**28
"""Bytes of such tensors from which on they stay in their files: they would be in memory several times."""


def every_tensor(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yield every tensor of a model: initializers and attributes, of subgraphs and functions too."""
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    for graph in graphs:  # The list grows: subgraphs are appended as they are found.
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.is_ref():
                    continue
                match attribute.type:
                    case ir.AttributeType.TENSOR:
                        yield attribute.as_tensor()
                    case ir.AttributeType.TENSORS:
                        yield from attribute.as_tensors()
                    case ir.AttributeType.GRAPH:
                        graphs.append(attribute.as_graph())
                    case ir.AttributeType.GRAPHS:
                        graphs += attribute.as_graphs()


def tensor_bytes(model: ir.Model) -> int:
    """Return how many bytes the tensors of a model take, in files or in memory."""
    return sum(tensor.nbytes for tensor in every_tensor(model))


def fits_one_message(model: ir.Model) -> bool:
    """Tell whether a model with all its tensors fits into one protobuf message."""
    return tensor_bytes(model) + _MESSAGE_ROOM <= PROTOBUF_LIMIT


def fits_one_message_without_files(model: ir.Model) -> bool:
    """Tell whether a model fits into one protobuf message without tensors that are in files, and without `Zeros`."""
    stored = (tensor for tensor in every_tensor(model) if not isinstance(tensor, ir.ExternalTensor | Zeros))
    embedded = sum(tensor.nbytes for tensor in stored)
    return embedded + _MESSAGE_ROOM <= PROTOBUF_LIMIT


def has_external_data(model: ir.Model) -> bool:
    """Tell whether any tensor of a model lives in a file beside it."""
    return any(isinstance(tensor, ir.ExternalTensor) for tensor in every_tensor(model))


def data_files(model: ir.Model) -> list[str]:
    """Return the files that the external tensors of a model are in."""
    return list(dict.fromkeys(tensor.path for tensor in every_tensor(model) if isinstance(tensor, ir.ExternalTensor)))


def as_attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as attributes of a node where a type tells the kind: onnx_ir tries one protocol after another."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, ir.Tensor):
            found[name] = ir.AttrTensor(name, value)
        elif isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            found[name] = ir.AttrInt64s(name, value)
        else:
            found[name] = value
    return found


def copy_model(model: ir.Model) -> ir.Model:
    """Return a copy of which nothing but the tensors, which are immutable, is shared with `model`.

    `ir.Model.clone` shares the types of values, and setting `Value.dtype` changes a type in place.
    """
    result = model.clone()
    functions = [graph for function in result.functions.values() for graph in (function.graph, *function.subgraphs())]
    for graph in (*result.graphs(), *functions):
        for value in (*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)):
            if isinstance(value.type, ir.TensorType):
                value.type = ir.TensorType(value.type.dtype, denotation=value.type.denotation)
            else:
                value.type = deepcopy(value.type)
    return result


def without_zeros(model: ir.Model) -> tuple[ir.Model, list[Zeros]]:
    """Return a model, or a copy of it without the initializers that are `Zeros`; and those."""
    found = {n: v.const_value for n, v in model.graph.initializers.items() if isinstance(v.const_value, Zeros)}
    if found:
        model = copy_model(model)
        for name in found:
            model.graph.initializers.pop(name).const_value = None
    return model, list(found.values())


def rename(value: ir.Value, name: str) -> None:
    """Give a value another name, and its tensor, whose name another model may share, to no other value."""
    if value.name == name:
        return
    tensor = value.const_value
    if isinstance(tensor, ir.serde.TensorProtoTensor):
        value.const_value = ir.serde.deserialize_tensor(ir.serde.serialize_tensor(tensor))
    elif tensor is not None:
        value.const_value = copy(tensor)
    value.name = name


def with_tensors_in_memory(model: ir.Model) -> ir.Model:
    """Return the model, or a copy with every external tensor read into memory where it has any.

    Raises:
        ModelError: external data cannot be read.
    """
    return _with_external(model, _read_tensor) if has_external_data(model) else model


def with_small_tensors_in_memory(model: ir.Model) -> ir.Model:
    """Return the model, or a copy with external tensors read into memory, but for the large ones where they are much.

    Raises:
        ModelError: external data cannot be read.
    """
    large = {id(tensor) for tensor in every_tensor(model) if _is_mapped(tensor)}
    if sum(tensor.nbytes for tensor in every_tensor(model) if id(tensor) in large) < _MUCH:
        return with_tensors_in_memory(model)
    return _with_external(model, lambda tensor: tensor if id(tensor) in large else _read_tensor(tensor))


def _with_external(model: ir.Model, read: Callable[[ir.ExternalTensor], ir.TensorProtocol]) -> ir.Model:
    """Return a copy with something else in the place of each external initializer, and attributes read into memory."""
    result = copy_model(model)
    read_attribute_tensors(result)
    for graph in result.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = read(value.const_value)
    return result


def _is_mapped(tensor: ir.TensorProtocol) -> bool:
    return isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= _MAPPED


def read_attribute_tensors(model: ir.Model) -> None:
    """Read external tensors in attributes into memory, as no ONNX writer moves their files."""
    nodes = [model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())]
    for group in nodes:
        for node in group:
            for attribute in list(node.attributes.values()):
                if (
                    not attribute.is_ref()
                    and attribute.type == ir.AttributeType.TENSOR
                    and isinstance(attribute.value, ir.ExternalTensor)
                ):
                    node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _read_tensor(attribute.value))


def _read_tensor(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    try:
        values = tensor.numpy().copy()
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the external data of {tensor.name!r}: {one_line(error)}") from error
    return ir.Tensor(values, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name, doc_string=tensor.doc_string)


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return an `onnx.ModelProto` that holds its tensors; if it would exceed 2 GB, external tensors stay external."""
    is_read = has_external_data(model) and fits_one_message(model)
    return serialized(_with_external(model, _read_late) if is_read else model)


def _read_late(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    """Return a tensor that is read when it is asked for, and then not kept."""
    return ir.LazyTensor(
        lambda: _read_tensor(unmapped(tensor)),
        dtype=tensor.dtype,
        shape=tensor.shape,
        name=str(tensor.name),
        doc_string=tensor.doc_string,
    )


def unmapped(tensor: ir.ExternalTensor) -> ir.ExternalTensor:
    """Return another tensor for the same data: what is read of it is in memory for as long as somebody has it."""
    return moved(tensor, tensor.location, tensor.base_dir)


def array_of(tensor: ir.TensorProtocol) -> npt.NDArray[Any]:
    """Return the elements of a tensor, which does not keep them in memory where they are in a file."""
    return np.asarray((unmapped(tensor) if isinstance(tensor, ir.ExternalTensor) else tensor).numpy())


def moved(
    tensor: ir.ExternalTensor,
    location: str | os.PathLike[str],
    folder: str | os.PathLike[str] = "",
    name: str | None = None,
) -> ir.ExternalTensor:
    """Return an external tensor that names its file in another way, or has another name."""
    return ir.ExternalTensor(
        location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=str(tensor.name) if name is None else name,
        doc_string=tensor.doc_string,
        base_dir=folder,
    )


def to_mapped_proto(model: ir.Model) -> onnx.ModelProto:
    """Return an `onnx.ModelProto` for use on this machine: large external tensors stay in their files where they are
    much, and it names these by their absolute paths.

    Raises:
        ModelError: external data cannot be read.
    """
    result = with_small_tensors_in_memory(model)
    if not has_external_data(result):
        return serialized(result)
    result = copy_model(result) if result is model else result
    for graph in result.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = moved(tensor, os.path.abspath(tensor.path))
    return serialized(result)


def serialized(model: ir.Model) -> onnx.ModelProto:
    """Return an `onnx.ModelProto` whose external tensors stay in their files, and which has `Zeros` without elements.

    Raises:
        ModelError: the model is malformed.
    """
    model, empty = without_zeros(model)
    try:
        proto: onnx.ModelProto = ir.to_proto(model)
        zeros.put(proto.graph, empty)
        return proto
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ModelError):  # Of a tensor that is read late.
                raise cause from None
            cause = cause.__cause__
        # The serializer documents no exceptions; whatever else it raises, the model is malformed.
        raise ModelError(f"onnx_ir.Model: is not a valid ONNX model: {one_line(error)}") from error
