"""Builds small ONNX graphs node by node, for tests that vary how a computation is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def parsed(text: str) -> onnx.ModelProto:
    """A model of one graph in ONNX's text form, with its types and shapes."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]>\n{text}')
    inferred: onnx.ModelProto = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    return inferred


class GraphBuilder:
    """Nodes in order; every method that adds one returns the name of its (first) output."""

    def __init__(self, opset: int = 20) -> None:
        self.opset = opset
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int = TensorProto.FLOAT) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, dtype, None))

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        array = np.asarray(value, dtype)
        name = f"c{len(self._constants)}"
        self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        name = f"v{len(self._nodes)}"
        names = [name, *(f"{name}_{k}" for k in range(1, outputs))]
        self._nodes.append(helper.make_node(op_type, inputs, names, name=f"n{len(self._nodes)}", **attributes))
        return name

    def ops(self, op_type: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Add a node as `op`, and return the names of all of its outputs."""
        first = self.op(op_type, *inputs, outputs=outputs, **attributes)
        return [first, *(f"{first}_{k}" for k in range(1, outputs))]

    def sum(self, x: str, axis: int, keepdims: int = 1) -> str:
        return self.op("ReduceSum", x, self.ints(axis), keepdims=keepdims)

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self._nodes, "g", self._inputs, self._outputs, list(self._constants.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        for output in inferred.graph.output:
            if not output.type.tensor_type.HasField("shape"):
                raise AssertionError(f"no shape was inferred for {output.name}")
        onnx.checker.check_model(inferred, full_check=True)
        return inferred
