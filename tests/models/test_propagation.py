"""Rules of sizes against what operators give: onnx's own node tests, with sizes that are known and with names."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.backend.test.loader import load_model_tests

from gradfuse.models import propagation
from gradfuse.models.propagation import Facts
from gradfuse.passes import shapes

Array = npt.NDArray[Any]

pytestmark = pytest.mark.usefixtures("inference_in_process")


@functools.cache
def _cases() -> list[tuple[str, onnx.ModelProto, list[Array], list[Array]]]:
    """Return name, model, inputs and outputs of the node tests of operators with a rule."""
    found = []
    for case in load_model_tests(kind="node"):
        model = case.model
        if model is None or len(model.graph.node) > 3 or case.name == "test_scan_sum":  # of opset 8
            continue
        assert case.data_sets is not None
        inputs, outputs = case.data_sets[0]
        arrays = all(isinstance(array, (np.ndarray, np.generic)) for array in (*inputs, *outputs))
        if arrays and all(node.op_type in propagation.RULES for node in model.graph.node):
            found.append((case.name, model, [np.asarray(a) for a in inputs], [np.asarray(a) for a in outputs]))
    return found


@pytest.mark.parametrize("constant", [False, True], ids=["inputs", "constants"])
@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names"])
def test_what_follows_is_what_operators_give(named: bool, constant: bool) -> None:
    """Integers are constants of the graph, or inputs: what is computed of them is known, or is not."""
    followed = 0
    for name, model, inputs, outputs in _cases():
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
    seen = {node.op_type for _, model, _, _ in _cases() for node in model.graph.node}
    # Those of Cast have types of their own, and those of onnxruntime are unknown to ONNX.
    assert propagation.RULES.keys() - seen <= {"Cast", "SimplifiedLayerNormalization", "MaxPoolGrad"}


def _known(text: str, opset: int = 18) -> tuple[Facts, dict[str, ir.Value]]:
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}'))
    values = {str(value.name): value for node in model.graph.all_nodes() for value in node.outputs}
    return Facts(model), values


ARITHMETIC = {
    "t = Gather (s, one)  v = Mul (t, one)": ["T"],
    "t = Gather (s, one)  v = Div (t, one)": ["T"],
    "t = Gather (s, one)  v = Sub (t, t)": [0],
    "t = Gather (s, two)  u = Div (t, two)  v = Concat <axis = 0> (u, two)": [4, 2],
    "t = Gather (s, two)  u = Mod (t, three)  v = Neg (u)": [-2],
    "t = Gather (s, two)  v = Div (n, t)": [0],
    "t = Slice (s, one, three)  v = Identity (t)": ["T", 8],
    "e = Equal (s, n)  v = Where (e, n, s)": ["N", "T", 8],
    "f = Cast <to = 1> (s)  r = Sqrt (f)  v = Cast <to = 7> (r)": [None, None, 2],
    "v = ReduceProd <keepdims = 1> (two)": [2],
    "t = Gather (s, one)  u = Max (t, zero)  v = Concat <axis = 0> (u, one)": ["T", 1],
}


@pytest.mark.parametrize("nodes", ARITHMETIC)
def test_sizes_are_followed_through_arithmetic(nodes: str) -> None:
    """Names of sizes as well, where a number leaves them as they are."""
    facts, values = _known(
        "(float[N,T,8] x) => (int64[K] v) <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, "
        f"int64[1] three = {{3}}, int64[1] n = {{-1}}> {{ s = Shape (x)  {nodes} }}"
    )
    assert list(facts.elements[values["v"]]) == ARITHMETIC[nodes]


@pytest.mark.parametrize(
    ("inputs", "nodes", "sizes"),
    [
        ("float[N,T,8] x", "s = Constant <value_ints = [0, -1, 4]> ()  y = Reshape (x, s)", ["N", None, 4]),
        ("float[N,T,8] x", "s = Constant <value_ints = [-1, 8]> ()  y = Reshape (x, s)", [None, 8]),
        ("float[N,2,4] x", "s = Constant <value_ints = [-1, 8]> ()  y = Reshape (x, s)", ["N", 8]),
        ("float[N,T,8] x", "s = Shape (x)  y = ConstantOfShape (s)", ["N", "T", 8]),
        ("float[A,3] x, float[B,3] w", "y = Add (x, w)", [None, 3]),
        ("float[A,3] x, float[3] w", "y = PRelu (x, w)", ["A", 3]),
        ("float[A,3] x, float[B,3] w", "y = PRelu (x, w)", [None, 3]),
        ("float[A,2,3] x, float[B,3,2] w", 'y = Einsum <equation = "...ab,...bc->...ac"> (x, w)', [None, 2, 2]),
        ("float[A,B] x, float[C,B] w", 'y = Einsum <equation = "ab,ab->ab"> (x, w)', [None, "B"]),
    ],
)
def test_sizes_are_numbers_or_names_or_new_names(inputs: str, nodes: str, sizes: list[int | str | None]) -> None:
    facts, values = _known(f"({inputs}) => (float y) {{ {nodes} }}".replace("float y", "y"))
    found = facts.shapes[values["y"]]
    assert [None if size in facts.invented else size for size in found] == sizes
    assert len({size for size in found if size in facts.invented}) == sizes.count(None)


@pytest.mark.parametrize(("test", "rank"), [("1", 2), ("2", 3)])
def test_a_condition_that_follows_from_sizes_chooses_a_branch(test: str, rank: int) -> None:
    """As torch.onnx writes the squeeze of a dimension whose size it does not know."""
    facts, values = _known(
        f"""(float[N,1,4] x) => (y) <int64[1] axis = {{1}}, int64 test = {{{test}}}, int64 one = {{1}}> {{
            s = Shape (x)  d = Gather (s, one)  c = Equal (d, test)
            y = If (c) <then_branch = t () => (float[A,B] p) {{ p = Squeeze (x, axis) }},
                        else_branch = e () => (float[A,B,C] q) {{ q = Identity (x) }}>
        }}"""
    )
    assert len(facts.shapes[values["y"]]) == rank


@pytest.mark.parametrize("declared", ["[5,7]", "[5,3,1]", "[]", "[?,3]", "[N,3]"])
def test_declared_shapes_that_contradict_are_replaced(declared: str) -> None:
    """onnxruntime takes such models, and goes by what it computes."""
    model = ir.from_proto(
        onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 18]> g (float[N,3] x) => (float[N,3] z) <float{declared} y>
            {{ y = Exp (x)  z = Neg (y) }}"""
        )
    )
    value = model.graph.node(0).outputs[0]
    shapes.infer(model, [value])
    assert value.shape == ir.Shape(["N", 3])


@pytest.mark.parametrize(
    ("declared", "kept"),
    [("1", False), ("2", False), ("N", False), ("T", False), ("rows", True), ("M", True)],
)
@pytest.mark.parametrize("node", ["y = Reshape (x, s)", "y = Flatten <axis = 2> (x)"])
def test_declared_sizes_that_a_product_contradicts_are_not_kept(node: str, declared: str, kept: bool) -> None:
    """Where axes are merged, names that exporters were told, and sizes of another batch, are of one axis alone."""
    model = ir.from_proto(
        onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 18]>
            g (float[N,T,3] x, float[M] other) => (float[{declared},3] z)
            <int64[2] s = {{-1, 3}}, float[{declared},3] y>
            {{ {node}  z = Neg (y) }}"""
        )
    )
    values = [node.outputs[0] for node in model.graph]
    shapes.infer(model, values)
    first, second = (value.shape for value in values)
    assert first == second and first is not None
    assert (first[0] == declared) is kept and not isinstance(first[0], int)


@pytest.mark.parametrize("free", [-1, "", "?"])
def test_dimensions_without_a_name_are_free(free: int | str) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[A,3] x, float[B,3] w) => (float[C,3] y) { y = Add (x, w) }'
    )
    for value in (*proto.graph.input, *proto.graph.output):
        dim = value.type.tensor_type.shape.dim[0]
        dim.Clear()
        if isinstance(free, int):
            dim.dim_value = free
        else:
            dim.dim_param = free
    model = ir.from_proto(proto)
    facts = Facts(model)
    first, second, result = (facts.shapes[v][0] for v in (*model.graph.inputs, model.graph.node(0).outputs[0]))
    assert len({first, second, result}) == 3 and {first, second, result} <= facts.invented
