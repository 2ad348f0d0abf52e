"""Runs one aclnn operator by its function body: on stock onnxruntime, without our library, and on onnx.reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from gradfuse.custom_ops import DOMAIN, OPS, VERSION
from gradfuse.custom_ops.functions import attach
from gradfuse.custom_ops.operator import Value

BACKENDS = ("onnxruntime", "reference")

ONNX_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}


@cache
def newest_opset() -> int:
    """The newest default opset that both the installed onnx and the installed onnxruntime know."""
    for opset in range(onnx.defs.onnx_opset_version(), 17, -1):
        text = f'<ir_version: 10, opset_import: ["": {opset}]> g (float[1] x) => (float[1] y) {{ y = Exp(x) }}'
        try:
            ort.InferenceSession(onnx.parser.parse_model(text).SerializeToString())
        except Exception:
            continue
        return opset
    return 17


def opsets() -> tuple[int, ...]:
    """The default opsets which the tests of function bodies run."""
    return (15, 17, 18, 21, newest_opset())


def types_of_outputs(op: str, dtypes: Sequence[int | None]) -> list[int]:
    """The element types of an operator's outputs for inputs of these, None for an absent one."""
    operator = OPS[op]

    def of(*variables: str) -> int:
        pairs = zip(operator.inputs, dtypes, strict=False)
        found = {i.type: dtype for i, dtype in reversed(list(pairs)) if dtype is not None}
        return next((found[variable] for variable in variables if variable in found), TensorProto.FLOAT)

    return operator.output_types(of("T", "A"), of("A", "T"))


def one_node(
    op: str,
    inputs: Sequence[tuple[int, Sequence[int | str | None]] | None],
    attributes: Mapping[str, Value],
    *,
    opset: int = 17,
    ranks: Sequence[int] = (),
    node_name: str = "node",
) -> onnx.ModelProto:
    """A model of one node without a body; ``inputs`` are element types and shapes, ``ranks`` those of the outputs."""
    operator = OPS[op]
    names = [i.name if given else "" for i, given in zip(operator.inputs, inputs, strict=False)]
    infos = [helper.make_tensor_value_info(name, *given) for name, given in zip(names, inputs, strict=True) if given]
    outputs = [
        helper.make_tensor_value_info(output.name, dtype, [None] * rank)
        for output, dtype, rank in zip(
            operator.outputs,
            types_of_outputs(op, [given[0] if given else None for given in inputs]),
            ranks or [0] * len(operator.outputs),
            strict=True,
        )
    ]
    if not ranks:
        for output in outputs:
            output.ClearField("type")
    node = helper.make_node(op, names, [o.name for o in operator.outputs], name=node_name, domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, VERSION)]
    graph = helper.make_graph([node], "one_node", infos, outputs)
    return helper.make_model(graph, opset_imports=imports, ir_version=helper.find_min_ir_version_for(imports, True))


def with_bodies(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model with the function bodies attached."""
    copy = ir.from_proto(model)
    attach(copy)
    return ir.to_proto(copy)


def run(
    op: str, backend: str, *inputs: Tensor | None, ranks: Sequence[int], opset: int = 17, **attributes: Value
) -> list[Tensor]:
    """Run one operator on tensors, given in the schema's order, None for an absent one; gives its outputs."""
    types = tuple(None if tensor is None else (ONNX_TYPES[tensor.dtype], tensor.dim()) for tensor in inputs)
    runner = _runner(op, backend, types, tuple(ranks), opset, tuple(sorted(attributes.items())))
    names = [i.name for i in OPS[op].inputs]
    feeds = {name: tensor for name, tensor in zip(names, inputs, strict=False) if tensor is not None}
    return [torch.from_numpy(np.array(out)) for out in runner(feeds)]


@lru_cache(64)  # each takes megabytes
def _runner(
    op: str,
    backend: str,
    types: tuple[tuple[int, int] | None, ...],
    ranks: tuple[int, ...],
    opset: int,
    attributes: tuple[tuple[str, Value], ...],
) -> Any:
    """A function from named tensors to outputs: arrays, bfloat16 ones widened to float32, which is exact."""
    shapes = [None if given is None else (given[0], [None] * given[1]) for given in types]
    model = one_node(op, shapes, dict(attributes), opset=opset, ranks=ranks)
    for output in model.graph.output:
        if output.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            name = output.name
            output.name = f"{name}_wide"
            output.type.tensor_type.elem_type = TensorProto.FLOAT
            model.graph.node.append(helper.make_node("Cast", [name], [output.name], to=TensorProto.FLOAT))
    model = with_bodies(model)
    onnx.checker.check_model(model, full_check=True)
    if backend == "reference":
        evaluator = ReferenceEvaluator(model)

        def evaluate(feeds: Mapping[str, Tensor]) -> Any:
            with np.errstate(all="ignore"):
                return evaluator.run(None, {name: to_numpy(tensor) for name, tensor in feeds.items()})

        return evaluate
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def infer(feeds: Mapping[str, Tensor]) -> Any:
        return session.run(None, {name: to_ort_value(tensor) for name, tensor in feeds.items()})

    return infer


def inferred(
    op: str, *inputs: tuple[int, Sequence[int | str | None]] | None, **attributes: Value
) -> list[tuple[int, tuple[int | str | None, ...]]]:
    """Element types and shapes of the outputs, by onnx's strict shape inference of a model of one node."""
    model = one_node(op, inputs, attributes)
    result = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    onnx.checker.check_model(result, full_check=True)
    found = []
    for output in result.graph.output:
        tensor = output.type.tensor_type
        dims = (d.dim_value if d.HasField("dim_value") else _own_name(d.dim_param) for d in tensor.shape.dim)
        found.append((tensor.elem_type, tuple(dims)))
    return found


def _own_name(name: str) -> str | None:
    """The name of a dimension, or None for one that shape inference made up."""
    return None if not name or name.startswith("unk__") else name


def refuses(backend: str, rule: str) -> AbstractContextManager[Any]:
    """Expect the error at run time of the node of a body which is named after the broken rule."""
    if backend == "reference":
        return pytest.raises(IndexError, match="out of bounds")
    return pytest.raises(Exception, match=rule)


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The array of a tensor; bfloat16 as ml_dtypes has it."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def to_ort_value(tensor: Tensor) -> ort.OrtValue:
    """The onnxruntime value of a tensor of any type, bfloat16 included."""
    if tensor.dtype == torch.bfloat16:
        bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())
