"""Large weights that do not train, as inputs of the models that a session runs: in memory once for all of them.

As constants, onnxruntime would copy them for each session, pack them for its products, and keep the transposes that the
backward pass reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.models import ort_values
from gradfuse.models.zeros import Zeros
from gradfuse.training.arguments import contiguous

_LEAST, _LEAST_TOGETHER = 2**16, 2**24
"""From how many bytes on a weight counts, and what all of a model have to be worth it."""
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_PRODUCTS = ("MatMul", "Gemm")
"""Operators of onnxruntime that are as fast with a weight that is an input, unless they have few rows. Convolutions are
not: constant kernels are laid out for their loops."""


class FrozenWeights:
    """The weights of a session's models that are inputs there, by name."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def lift(self, model: ir.Model, *, known: bool = False) -> tuple[str, ...]:
        """Make the large weights of a model inputs of it, in place; return the names of all inputs that are weights.

        A weight stays a constant if another model has another one of its name.

        Args:
            model: the model.
            known: whether to take those only that other models have as well.
        """
        graph = model.graph
        lifted = [str(value.name) for value in graph.inputs if value.name in self._arrays]
        found = [value for value in graph.initializers.values() if _is_liftable(value, graph)]
        if known:
            found = [value for value in found if value.name in self._arrays]
        elif sum(_size(value) for value in found) < _LEAST_TOGETHER:
            return tuple(lifted)
        for value in found:
            name, tensor = str(value.name), value.const_value
            assert tensor is not None
            if not self._holds(name, tensor):
                continue
            del graph.initializers[name]
            value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
            value.const_value = None
            graph.inputs.append(value)
            lifted.append(name)
        return tuple(lifted)

    def put_back(self, model: ir.Model) -> None:
        """Make the weights constants of a model again, in place."""
        graph = model.graph
        for value in [value for value in graph.inputs if value.name in self._arrays]:
            graph.inputs.remove(value)
            value.const_value = ir.tensor(self._arrays[str(value.name)], name=value.name)
            graph.register_initializer(value)

    def bind(self, binding: Any, names: Iterable[str]) -> None:
        """Let runs of a session read the weights."""
        for name in names:
            binding.bind_ortvalue_input(name, self._values[name])

    def shared_with(self, constants: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return these constants, with the arrays of equal weights in place of copies."""
        return {name: self._arrays[name] if self._is(name, array) else array for name, array in constants.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __len__(self) -> int:
        return len(self._values)

    def _holds(self, name: str, tensor: ir.TensorProtocol) -> bool:
        """Whether the weight of a name is a tensor, which it becomes if there is none."""
        array = contiguous(tensor.numpy())
        if name in self._arrays:
            return self._is(name, array)
        self._arrays[name] = array
        self._values[name] = ort_values.of_array(array, f"{name!r}")
        return True

    def _is(self, name: str, array: npt.NDArray[Any]) -> bool:
        own = self._arrays.get(name)
        return (
            own is not None
            and (own.dtype, own.shape) == (array.dtype, array.shape)
            and (own is array or bool(np.array_equal(_bits(own), _bits(array))))
        )


def _is_liftable(value: ir.Value, graph: ir.Graph) -> bool:
    tensor = value.const_value
    if tensor is None or isinstance(tensor, Zeros) or tensor.dtype not in _FLOATS or tensor.nbytes < _LEAST:
        return False
    if value.is_graph_input() or value.is_graph_output():
        return False
    return all(use.node.graph is graph and _reads_anyhow(use.node, use.idx) for use in value.uses())


def _reads_anyhow(node: ir.Node, index: int) -> bool:
    """Whether an operator is as fast if what it reads there is no constant."""
    if node.domain == custom_ops.DOMAIN:
        return True
    if node.domain:
        return False
    if node.op_type == "Transpose":
        (turned,) = node.outputs
        return not turned.is_graph_output() and all(_reads_anyhow(use.node, use.idx) for use in turned.uses())
    return node.op_type in _PRODUCTS or (node.op_type == "Gather" and index == 0)


def _size(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.nbytes


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))
