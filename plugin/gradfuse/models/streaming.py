"""Writes a model as one protobuf message, one large tensor after another: no message that holds them is ever made."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from gradfuse.models import zeros
from gradfuse.models.tensors import copy_model, without_zeros
from gradfuse.models.wire import field

SMALLEST = 2**20
"""Bytes from which on an initializer of the main graph is written by itself."""


def save(model: ir.Model, path: str) -> None:
    """Write a model without `Zeros`; external tensors stay in their files, and the rest must fit into one message."""
    model, empty = without_zeros(model)
    large = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
        and not isinstance(value.const_value, ir.ExternalTensor)
        and value.const_value.nbytes >= SMALLEST
        and value.const_value.dtype != ir.DataType.STRING
    }
    if not large and not empty:
        ir.save(model, path)
        return
    copy = copy_model(model)
    for name in large:
        copy.graph.initializers[name].const_value = ir.tensor(np.zeros(0, np.float32), name=name)
    proto = ir.to_proto(copy)
    small = [tensor for tensor in proto.graph.initializer if tensor.name not in large]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(small)
    zeros.put(proto.graph, empty)
    graph = proto.graph.SerializeToString()
    proto.ClearField("graph")
    heads = [_head(name, tensor) for name, tensor in large.items()]
    sizes = [len(head) + tensor.nbytes for head, tensor in zip(heads, large.values(), strict=True)]
    begins = [field(onnx.GraphProto.INITIALIZER_FIELD_NUMBER, size) for size in sizes]
    with open(path, "wb") as file:
        file.write(proto.SerializeToString())
        file.write(field(onnx.ModelProto.GRAPH_FIELD_NUMBER, len(graph) + sum(map(len, begins)) + sum(sizes)))
        file.write(graph)
        for begin, head, tensor in zip(begins, heads, large.values(), strict=True):
            file.write(begin)
            file.write(head)
            if file.write(tensor.tobytes()) != tensor.nbytes:
                raise ValueError(f"the tensor {tensor.name!r} has another size than it says")


def _head(name: str, tensor: ir.TensorProtocol) -> bytes:
    """Return the message of a tensor up to its elements."""
    proto = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
    if tensor.doc_string:
        proto.doc_string = tensor.doc_string
    for key, value in tensor.metadata_props.items():
        proto.metadata_props.add(key=key, value=value)
    return bytes(proto.SerializeToString()) + field(onnx.TensorProto.RAW_DATA_FIELD_NUMBER, tensor.nbytes)
