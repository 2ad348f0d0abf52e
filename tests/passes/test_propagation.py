"""Rules of sizes against what operators give: onnx's own node tests, with sizes that are known and with names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.backend.test.loader import load_model_tests

from gradfuse.passes import propagation, shapes
from gradfuse.passes.propagation import Facts

Array = npt.NDArray[Any]

pytestmark = pytest.mark.usefixtures("inference_in_process")


def _cases() -> Iterator[tuple[str, onnx.ModelProto, list[Array], list[Array]]]:
    """Yield name, model, inputs and outputs of the node tests of operators with a rule."""
    for case in load_model_tests(kind="node"):
        model = case.model
        if model is None or len(model.graph.node) > 3 or model.opset_import[0].domain:
            continue
        inputs, outputs = case.data_sets[0]
        arrays = all(isinstance(array, (np.ndarray, np.generic)) for array in (*inputs, *outputs))
        if arrays and all(node.op_type in propagation.RULES for node in model.graph.node):
            yield case.name, model, [np.asarray(a) for a in inputs], [np.asarray(a) for a in outputs]


CASES = list(_cases())


@pytest.mark.parametrize("constant", [False, True], ids=["inputs", "constants"])
@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names"])
def test_what_follows_is_what_operators_give(named: bool, constant: bool) -> None:
    """Integers are constants of the graph, or inputs: what is computed of them is known, or is not."""
    followed = 0
    for name, model, inputs, outputs in CASES:
        graph = ir.from_proto(model)
        bindings: dict[str, int] = {}
        for value, array in zip(list(graph.graph.inputs), inputs, strict=True):
            dims: list[int | str] = list(array.shape)
            if named:
                dims = [f"{value.name}_{axis}" for axis in range(array.ndim)]
                bindings |= dict(zip(map(str, dims), array.shape, strict=True))
            value.shape = ir.Shape(dims)
            if constant and array.dtype.kind in "iub" and value.dtype != ir.DataType.STRING:
                value.const_value = ir.tensor(array, dtype=value.dtype, name=value.name)
                graph.graph.initializers[str(value.name)] = value
                graph.graph.inputs.remove(value)
        for node in graph.graph:
            for value in node.outputs:
                value.shape = value.type = None
        facts = Facts(graph)
        for value, array in zip(graph.graph.outputs, outputs, strict=True):
            if value not in facts.shapes:
                continue
            followed += 1
            sizes = facts.shapes[value]
            assert len(sizes) == array.ndim, name
            known = [bindings.get(size, None) if isinstance(size, str) else size for size in sizes]
            pairs = zip(known, array.shape, strict=True)
            assert all(size is None or size == true for size, true in pairs), (name, sizes, array.shape)
            dtype = facts.dtypes.get(value)
            assert dtype is None or dtype.numpy() == array.dtype or array.dtype.kind in "OU", (name, dtype)
            elements = facts.elements.get(value)
            if elements is not None:
                assert elements.shape == array.shape, name
                for element, true in zip(elements.flat, array.flat, strict=True):
                    element = bindings.get(element) if isinstance(element, str) else element
                    assert element is None or element == true or (element != element and true != true), name
    assert followed > 300


def test_every_operator_with_a_rule_is_among_the_node_tests() -> None:
    seen = {node.op_type for _, model, _, _ in CASES for node in model.graph.node}
    assert propagation.RULES.keys() - seen == {"LRN", "If"} & (propagation.RULES.keys() - seen)
