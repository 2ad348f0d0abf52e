"""Bodies of functions in the place of their calls: the same results as onnxruntime's calls, and no name twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from gradfuse.models.conversion import inline_functions
from gradfuse.models.inlining import inline

CALLS = """
<ir_version: 10, opset_import: ["" : 20, "local" : 1]>
calls (float[3, 4] x, bool flag) => (float[3, 4] y, float[3, 4] z)
{
    p = local.scaled <factor = 3.0> (x)
    yes = Identity (p)
    a, b = local.pair (yes, p)
    y = If (flag) <
        then_branch = yes () => (float[3, 4] p_2) { p_2 = local.scaled (a) },
        else_branch = no () => (float[3, 4] p_3) { q = local.scaled <factor = 7.0> (b) p_3 = Neg (q) }
    >
    z = local.scaled <factor = 5.0> (y)
}
<domain: "local", opset_import: ["" : 20]>
scaled <factor: float = 2.0> (v) => (r)
{
    c = Constant <value_float: float = @factor> ()
    p = Mul (v, c)
    one = Constant <value_float = 1.0> ()
    r = Add (p, one)
}
<domain: "local", opset_import: ["" : 20, "local" : 1]>
pair (u, v) => (r, v)
{
    p = local.scaled <factor = 0.5> (u)
    r = Sub (p, v)
}
"""
"""Functions in functions and branches, defaults of attributes, a result that is an operand, names that occur twice."""


def results(model: onnx.ModelProto, flag: bool) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    found: list[np.ndarray] = session.run(None, {"x": x, "flag": np.array(flag)})
    return found


CHOICES: dict[str, Callable[[ir.Function], bool]] = {
    "all": lambda function: True,
    "inner": lambda function: function.name == "scaled",
    "outer": lambda function: function.name == "pair",
}


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_bodies_compute_what_calls_compute(choice: str, flag: bool) -> None:
    # onnxruntime calls no function that gives back an operand as it is.
    called = CALLS.replace("=> (r, v)", "=> (r, w)").replace("(p, v)\n", "(p, v) w = Identity (v)\n")
    original = onnx.parser.parse_model(called)
    text = called if choice == "inner" else CALLS
    model = ir.from_proto(onnx.parser.parse_model(text))
    inline(model, CHOICES[choice])
    assert {function.name for function in model.functions.values()} == {
        "all": set(),
        "inner": {"pair"},
        "outer": {"scaled"},
    }[choice]
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    for wanted, got in zip(results(original, flag), results(proto, flag), strict=True):
        np.testing.assert_array_equal(got, wanted)
    graphs = [model.graph, *model.graph.subgraphs()]
    names = [value.name for graph in graphs for node in graph for value in node.outputs]
    assert len(names) == len(set(names))


def test_what_cannot_be_put_in_is_refused() -> None:
    for old, new, reason in (
        ("local.pair (yes, p)", "local.pair (yes, p, x)", "more inputs or outputs than it has"),
        ('opset_import: ["" : 20]>\nscaled', 'opset_import: ["" : 19]>\nscaled', "version 19"),
        ("local.pair (yes, p)", "local.pair (yes)", "gives an input that its call leaves out"),
    ):
        model = ir.from_proto(onnx.parser.parse_model(CALLS.replace(old, new)))
        with pytest.raises(ValueError, match=reason):
            inline(model, CHOICES["all"])


@pytest.mark.parametrize(("of_functions", "of_model"), [(19, 20), (20, 19)])
def test_functions_of_another_opset_are_put_in(of_functions: int, of_model: int) -> None:
    # onnxruntime calls no function that gives back an operand as it is.
    original = onnx.parser.parse_model(
        CALLS.replace("=> (r, v)", "=> (r, w)").replace("(p, v)\n", "(p, v) w = Identity (v)\n")
    )
    original.opset_import[0].version = of_model
    for function in original.functions:
        function.opset_import[0].version = of_functions
    model = ir.from_proto(original)
    inline_functions(model)
    assert not model.functions and model.opset_imports[""] == 20
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    for wanted, got in zip(results(original, True), results(proto, True), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_model_without_chosen_functions_stays_as_it_is() -> None:
    model = ir.from_proto(onnx.parser.parse_model(CALLS))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    inline(model, lambda function: False)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
