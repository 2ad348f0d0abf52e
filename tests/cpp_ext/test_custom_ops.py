"""The library as onnxruntime sees it: the table of ops, attributes, and models that hold anything at all."""

from __future__ import annotations

import ctypes
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from backends import ONNX_TYPES, one_node
from cpp_ext.single_node import assert_same_bits, described, run, session_of
from onnx import TensorProto, helper
from operators import SAMPLES

import gradfuse
from gradfuse.custom_ops import DOMAIN, OPS, VERSION

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64

_ONNX_NAMES = {"tensor(float)": "float32", "tensor(double)": "float64"}


def short_names(types: Any) -> set[str]:
    return {_ONNX_NAMES.get(name, name.removeprefix("tensor(").removesuffix(")")) for name in types}


def test_the_library_has_exactly_the_operators_of_the_python_table() -> None:
    assert set(described()) == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_kernels_and_schema_agree(name: str) -> None:
    operator, kernel = OPS[name], described()[name]
    assert set(kernel["types"]) == short_names(operator.types)
    assert kernel["outputs"] == [output.name for output in operator.outputs]
    defaults = {
        name: tuple(value) if isinstance(value, list) else value for name, value in kernel["attributes"].items()
    }
    assert defaults == {a.name: a.default for a in operator.attributes}
    assert [i["name"] for i in kernel["inputs"]] == [i.name for i in operator.inputs]
    for ours, theirs in zip(kernel["inputs"], operator.inputs, strict=True):
        assert ours["optional"] == theirs.optional
        types = kernel["types"] if ours["types"] == "T" else ours["types"]
        assert set(types) == short_names(operator.constraints[theirs.type])


def test_the_library_exports_its_entrances_only() -> None:
    library = ctypes.CDLL(gradfuse.get_library_path())
    assert library.RegisterCustomOps and library.gradfuse_describe_ops
    assert library.CreateEpFactories and library.ReleaseEpFactory
    assert not hasattr(library, "_ZN8gradfuse8DescribeERKNS_6TensorE")


def model_of(
    node: onnx.NodeProto, inputs: dict[str, tuple[int, tuple[int, ...]]], outputs: list[str]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(name, *given) for name, given in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def outcome(model: onnx.ModelProto, feeds: dict[str, np.ndarray[Any, Any]]) -> str:
    """What onnxruntime says to a model: "" where it runs."""
    try:
        session_of(model).run(None, feeds)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "attribute, message",
    [
        ({"reduction": "mean"}, "MseLossBackward (node 'a'): reduction is a string; expected an int"),
        ({"reduction": 1.0}, "MseLossBackward (node 'a'): reduction is a float; expected an int"),
        ({"reduction": [1, 2]}, "MseLossBackward (node 'a'): reduction is a list; expected an int"),
        ({"reduction": [1.0, 2.0]}, "MseLossBackward (node 'a'): reduction is a list; expected an int"),
    ],
)
def test_attributes_of_another_kind_are_refused_when_the_session_is_made(
    attribute: dict[str, Any], message: str
) -> None:
    node = helper.make_node("MseLossBackward", ["g", "s", "t"], ["out"], name="a", domain=DOMAIN, **attribute)
    model = model_of(node, dict.fromkeys("gst", (FLOAT, (2,))), ["out"])
    with pytest.raises(Exception, match="MseLossBackward") as caught:
        session_of(model)
    assert message in str(caught.value)


def test_absent_attributes_have_their_defaults_and_a_node_may_have_no_name() -> None:
    x = np.arange(4, dtype=np.float32)
    node = helper.make_node("MseLossBackward", ["g", "s", "t"], ["out"], domain=DOMAIN)
    model = model_of(node, dict.fromkeys("gst", (FLOAT, (4,))), ["out"])
    (out,) = session_of(model).run(None, {"g": x, "s": x, "t": np.ones(4, np.float32)})
    np.testing.assert_array_equal(out, 2 * (x - 1) * x / 4)
    node = helper.make_node("GroupedBiasAddGrad", ["g"], ["out"], domain=DOMAIN)
    text = outcome(model_of(node, {"g": (FLOAT, (2,))}, ["out"]), {"g": x[:2]})
    assert "GroupedBiasAddGrad (node ''): grad_y is float32(2); expected 3 dimensions" in text


def described_inputs(name: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Types and shapes for every input of an operator: those of a valid call, and scalars for the others."""
    given: dict[str, tuple[int, tuple[int, ...]]] = {}
    for described_input, value in zip_longest(OPS[name].inputs, SAMPLES[name].valid().inputs):
        given[described_input.name] = (FLOAT, ()) if value is None else (ONNX_TYPES[value.dtype], tuple(value.shape))
    return given


def arrays(inputs: dict[str, tuple[int, tuple[int, ...]]]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.ones(shape, helper.tensor_dtype_to_np_dtype(dtype)) for name, (dtype, shape) in inputs.items()}


@pytest.mark.parametrize("name", OPS)
def test_no_malformed_node_ends_the_process(name: str) -> None:
    """Inputs left out, empty or too many; outputs left out, empty or too many; ranks of all kinds; wrong types."""
    operator, given = OPS[name], described_inputs(name)
    names = list(given)
    outputs = [output.name for output in operator.outputs]
    cases: list[tuple[list[str], list[str], dict[str, tuple[int, tuple[int, ...]]]]] = []
    for index in range(len(names)):
        hole = [*names[:index], "", *names[index + 1 :]]
        rest = {key: value for key, value in given.items() if key != names[index]}
        cases.append((hole, outputs, rest))
        cases.append((names[:index], outputs, {key: given[key] for key in names[:index]}))
        for shape in ((), (0,), (2, 0), (1,) * 9):
            cases.append((names, outputs, {**given, names[index]: (given[names[index]][0], shape)}))
        cases.append((names, outputs, {**given, names[index]: (TensorProto.UINT8, given[names[index]][1])}))
    cases.append(([*names, names[0]], outputs, given))
    for some in ([], [""], [*outputs, "more"], outputs[:1], ["", *outputs[1:]]):
        cases.append((names, some, given))
    refused = 0
    for inputs, node_outputs, shapes in cases:
        node = helper.make_node(name, inputs, node_outputs, name="node", domain=DOMAIN)
        model = model_of(node, shapes, [output for output in node_outputs if output])
        message = outcome(model, arrays(shapes))
        assert "\n" not in message.strip()
        refused += bool(message)
    assert refused > len(cases) // 2


def test_types_that_an_op_does_not_take_are_refused_when_the_session_is_made() -> None:
    with pytest.raises(Exception, match="MseLossBackward") as caught:
        session_of(one_node("MseLossBackward", [(TensorProto.DOUBLE, [2])] * 3, {}))
    assert "\n" not in str(caught.value).strip()
    with pytest.raises(Exception, match="MseLossBackward"):
        session_of(one_node("MseLossBackward", [(FLOAT, [2]), (TensorProto.FLOAT16, [2]), (FLOAT, [2])], {}))


def test_nodes_in_one_session_and_sessions_side_by_side_keep_their_own_attributes() -> None:
    torch.manual_seed(0)
    grad, self, target = torch.randn(3, 8)
    (summed,) = run("MseLossBackward", grad, self, target, reduction=2)
    (mean,) = run("MseLossBackward", grad, self, target)
    assert_same_bits(summed / 8, mean)
    nodes = [
        helper.make_node("MseLossBackward", ["g", "s", "t"], [f"out{r}"], name=f"n{r}", domain=DOMAIN, reduction=r)
        for r in (1, 2)
    ]
    model = model_of(nodes[0], dict.fromkeys("gst", (FLOAT, (8,))), ["out1", "out2"])
    model.graph.node.append(nodes[1])
    out1, out2 = session_of(model).run(None, {"g": grad.numpy(), "s": self.numpy(), "t": target.numpy()})
    assert_same_bits(torch.from_numpy(out1), mean)
    assert_same_bits(torch.from_numpy(out2), summed)


def test_the_library_can_be_registered_in_many_options_and_outlive_them() -> None:
    model = one_node("GroupedBiasAddGrad", [(FLOAT, [2, 3, 4])], {}, ranks=[2])
    sessions = [session_of(model) for _ in range(3)]
    del sessions[0]
    x = np.ones((2, 3, 4), np.float32)
    for session in sessions:
        np.testing.assert_array_equal(session.run(None, {"grad_y": x})[0], np.full((2, 4), 3))
