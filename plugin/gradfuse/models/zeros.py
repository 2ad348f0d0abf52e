"""Zeros that a model's file does not store: the default value of an input is sparse, without elements.

An optimizer's state begins with zeros, twice as many as there are parameters. onnxruntime makes such initializers dense
when it loads a model. onnx_ir has none, so they are put into messages, and found in them, here.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import onnx_ir as ir

from gradfuse.models.arrays import Arrays

SMALLEST = 2**16
"""Bytes from which on zeros are not stored. Not every tool reads sparse initializers, and smaller ones cost nothing."""


class Zeros(ir.LazyTensor):
    """A tensor of zeros, which takes no memory as long as nobody writes into it."""

    def __init__(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> None:
        super().__init__(
            lambda: ir.Tensor(np.zeros(shape, dtype.numpy()), dtype=dtype, shape=ir.Shape(shape)),
            dtype=dtype,
            shape=ir.Shape(shape),
            name=name,
        )


def all_zeros(arrays: Arrays) -> set[str]:
    """Return the names of the larger arrays that are zeros throughout."""
    return {name for name, array in arrays.items() if array.nbytes >= SMALLEST and not array.any()}


def put(graph: onnx.GraphProto, tensors: Iterable[Zeros]) -> None:
    """Add tensors to a message as sparse initializers without elements."""
    for tensor in tensors:
        sparse = graph.sparse_initializer.add(dims=tensor.shape.numpy())
        sparse.values.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=int(tensor.dtype), dims=[0], raw_data=b""))
        sparse.indices.CopyFrom(onnx.TensorProto(data_type=onnx.TensorProto.INT64, dims=[0], raw_data=b""))


def of(graph: onnx.GraphProto) -> list[Zeros]:
    """Return the default values of inputs that are sparse and have no elements."""
    if not graph.sparse_initializer:
        return []
    inputs = {value.name for value in graph.input}
    return [
        Zeros(sparse.values.name, ir.DataType(sparse.values.data_type), tuple(sparse.dims))
        for sparse in graph.sparse_initializer
        if sparse.values.name in inputs and _is_empty(sparse)
    ]


def register(graph: ir.Graph, tensors: Iterable[Zeros]) -> None:
    """Make tensors the default values of the inputs of their names."""
    inputs = {value.name: value for value in graph.inputs}
    for tensor in tensors:
        value = inputs[tensor.name]
        value.const_value = tensor
        graph.register_initializer(value)


def _is_empty(sparse: onnx.SparseTensorProto) -> bool:
    """Tell whether a sparse tensor has no elements, and its numbers are of whole bytes."""
    values = sparse.values
    if list(values.dims) != [0] or not values.name or min(sparse.dims, default=0) <= 0:
        return False
    try:
        dtype = ir.DataType(values.data_type)
    except ValueError:
        return False
    return dtype not in (ir.DataType.UNDEFINED, ir.DataType.STRING) and dtype.itemsize >= 1
