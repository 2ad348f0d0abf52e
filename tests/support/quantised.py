"""MatMulNBits of onnxruntime, with weights that are dequantised in float64 by numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

Array = npt.NDArray[Any]
Infos = Mapping[str, tuple[Any, Sequence[int | str]]]
"""Name -> element type and shape."""


def packed(numbers: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Rows of numbers as bytes, the first number of a byte in its lowest bits."""
    per_byte = 8 // bits
    rows = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_byte))).reshape(len(numbers), -1, per_byte)
    return np.asarray((rows << (bits * np.arange(per_byte))).sum(-1), np.uint8)


@dataclasses.dataclass(frozen=True)
class Quantised:
    """A weight of MatMulNBits.

    Attributes:
        weight: its value (N, K), in float64.
        inputs: the inputs of the operator after the first, by name: the weight, scales, zero points.
        attributes: its attributes.
    """

    weight: npt.NDArray[np.float64]
    inputs: dict[str, Array]
    attributes: dict[str, int]

    def initializers(self) -> list[onnx.TensorProto]:
        return [numpy_helper.from_array(array, name) for name, array in self.inputs.items()]

    def node(self, x: str, y: str, bias: str = "", **attributes: int) -> onnx.NodeProto:
        names = [x, *self.inputs]
        if bias:
            names += [""] * (5 - len(names)) + [bias]
        node = helper.make_node("MatMulNBits", names, [y], name=f"{y}_node", domain="com.microsoft")
        node.attribute.extend(helper.make_attribute(*item) for item in {**self.attributes, **attributes}.items())
        return node


def quantised(
    rows: int,
    columns: int,
    bits: int = 4,
    block_size: int = 16,
    zero_points: str = "none",
    dtype: str = "float32",
    name: str = "w",
    seed: int = 0,
) -> Quantised:
    """A random weight (rows, columns); its zero points are "none", "packed" or "float"."""
    rng = np.random.default_rng(seed)
    blocks = -(-columns // block_size)
    numbers = rng.integers(0, 2**bits, (rows, blocks * block_size))
    scales = rng.uniform(0.5, 2, (rows, blocks)).astype(dtype) / np.array(2**bits, dtype)
    inputs: dict[str, Array] = {f"{name}_Q{bits}": packed(numbers, bits).reshape(rows, blocks, -1)}
    inputs[f"{name}_scales"] = scales
    zeros: Array = np.full((rows, blocks), 2 ** (bits - 1))
    if zero_points == "packed":
        zeros = rng.integers(0, 2**bits, (rows, blocks))
        inputs[f"{name}_zero_points"] = packed(zeros, bits)
    elif zero_points == "float":
        zeros = rng.uniform(0, 2**bits, (rows, blocks)).astype(dtype)
        inputs[f"{name}_zero_points"] = zeros
    exact = numbers.reshape(rows, blocks, -1) - zeros.astype(np.float64)[..., None]
    weight = (exact * scales.astype(np.float64)[..., None]).reshape(rows, -1)[:, :columns]
    return Quantised(weight, inputs, {"K": columns, "N": rows, "bits": bits, "block_size": block_size})


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: Infos,
    outputs: Infos,
    initializers: list[onnx.TensorProto],
    opset: int = 18,
) -> onnx.ModelProto:
    """A model with onnxruntime's own operators; its intermediate values have no types."""

    def infos(values: Infos) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in values.items()
        ]

    graph = helper.make_graph(nodes, "quantised", infos(inputs), infos(outputs), initializers)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)
