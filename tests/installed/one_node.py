"""Models of one node, with the arguments of a case of `cpp_ext/tests/device/cases`, by numpy and onnx alone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx import TensorProto, helper

from gradfuse.custom_ops import DOMAIN, OPS, VERSION
from gradfuse.custom_ops.functions import attach

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpp_ext" / "tests" / "device"))
from case import Case

ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
    "uint8": TensorProto.UINT8,
}


def model_of(case: Case, *, body: bool) -> bytes:
    """A model of one node with the arguments of a case, with or without the operator's function body."""
    operator = OPS[case.op]
    given = list(zip(operator.inputs, case.inputs, strict=False))
    names = [one.name if values is not None else "" for one, values in given]
    inputs = [
        helper.make_tensor_value_info(one.name, ONNX_TYPES[values.dtype], values.bits.shape)
        for one, values in given
        if values is not None
    ]
    outputs = [
        helper.make_tensor_value_info(output.name, ONNX_TYPES[dtype], [None] * exact.ndim)
        for output, dtype, exact in zip(operator.outputs, case.dtypes(), case.expected, strict=True)
    ]
    node = helper.make_node(case.op, names, [output.name for output in outputs], domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in case.attributes.items())
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    graph = helper.make_graph([node], "one_node", inputs, outputs)
    model = ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=8))
    if body:
        attach(model)
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized


def feeds_of(case: Case) -> dict[str, npt.NDArray[np.generic]]:
    """The inputs of the model of a case, by name."""
    return {
        one.name: values.bits.astype(bool) if values.dtype == "bool" else values.bits
        for one, values in zip(OPS[case.op].inputs, case.inputs, strict=False)
        if values is not None
    }
