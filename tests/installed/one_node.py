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
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
    "uint8": TensorProto.UINT8,
}


def _outside(dtype: str) -> int:
    """The type that a model has for it at its edges: numpy has no bfloat16."""
    return TensorProto.FLOAT if dtype == "bfloat16" else ONNX_TYPES[dtype]


def model_of(case: Case, *, body: bool) -> bytes:
    """A model of one node with the arguments of a case, with or without the operator's function body.

    Tensors of bfloat16 are float32 outside, and casts stand between.
    """
    operator = OPS[case.op]
    given = list(zip(operator.inputs, case.inputs, strict=False))
    names = [one.name if values is not None else "" for one, values in given]
    node = helper.make_node(case.op, names, [output.name for output in operator.outputs], domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in case.attributes.items())
    nodes = [node]
    inputs, outputs = [], []
    for at, (one, values) in enumerate(given):
        if values is not None:
            inputs.append(helper.make_tensor_value_info(one.name, _outside(values.dtype), values.bits.shape))
            if values.dtype == "bfloat16":
                node.input[at] = f"{one.name}_bfloat16"
                nodes.insert(0, helper.make_node("Cast", [one.name], [node.input[at]], to=TensorProto.BFLOAT16))
    for at, (output, dtype, exact) in enumerate(zip(operator.outputs, case.dtypes(), case.expected, strict=True)):
        outputs.append(helper.make_tensor_value_info(output.name, _outside(dtype), [None] * exact.ndim))
        if dtype == "bfloat16":
            node.output[at] = f"{output.name}_bfloat16"
            nodes.append(helper.make_node("Cast", [node.output[at]], [output.name], to=TensorProto.FLOAT))
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    graph = helper.make_graph(nodes, "one_node", inputs, outputs)
    model = ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=8))
    if body:
        attach(model)
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized


def feeds_of(case: Case) -> dict[str, npt.NDArray[np.generic]]:
    """The inputs of the model of a case, by name."""
    feeds: dict[str, npt.NDArray[np.generic]] = {}
    for one, values in zip(OPS[case.op].inputs, case.inputs, strict=False):
        if values is not None:
            wide = values.dtype == "bfloat16"
            feeds[one.name] = np.asarray(
                values.wide() if wide else values.bits, helper.tensor_dtype_to_np_dtype(_outside(values.dtype))
            )
    return feeds
