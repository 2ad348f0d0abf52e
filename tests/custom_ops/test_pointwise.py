"""The expressions of Pointwise, its shapes, its body, and what it refuses."""

from __future__ import annotations

import random
import re
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from backends import BACKENDS, inferred, one_node, run, with_bodies
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from operators import Sample
from operators import pointwise as samples

from gradfuse.custom_ops import DOMAIN
from gradfuse.custom_ops.pointwise_expressions import Apply, ExpressionError, Name, Number, Program, Statement, parse
from gradfuse.errors import ArgumentError
from gradfuse.export import dropout

OP = "Pointwise"
FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64

randoms = st.randoms(use_true_random=False)


def run_body(sample: Sample, backend: str = "onnxruntime") -> list[torch.Tensor]:
    rank = sample.inputs[0].dim() if sample.inputs[0] is not None else 0
    expression = str(sample.attributes["expression"])
    ranks = [rank if f"y{index} =" in expression else 1 for index in range(3)]
    return run(OP, backend, *sample.inputs, ranks=ranks, **sample.attributes)


def test_an_expression_is_read_and_written() -> None:
    program = parse(" t=Sigmoid(x1) ;\n y0 = Mul( Mul(x0,t), 0.5 );y2=t; ")
    assert program.text() == "t = Sigmoid(x1); y0 = Mul(Mul(x0, t), 0.5); y2 = t"
    assert (program.inputs, program.outputs, program.draws) == (("x0", "x1"), ("y0", "y2"), False)
    t = Apply("Sigmoid", (Name("x1"),))
    product = Apply("Mul", (Apply("Mul", (Name("x0"), Name("t"))), Number(0.5)))
    made = Program((Statement("t", t), Statement("y0", product), Statement("y2", Name("t"))))
    assert made == program
    assert [operator for operator, _ in made.instructions] == ["Sigmoid", "Mul", "Mul"]
    assert parse("y0 = Where(Kept(), x0, 0.0)").draws


@given(rng=randoms)
@settings(max_examples=20, deadline=None)
def test_what_is_written_is_read_as_the_same(rng: random.Random) -> None:
    program = parse(samples.random_expression(rng, samples.ANY))
    again = parse(program.text())
    assert again == program
    assert again.text() == program.text()


@given(bits=st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_numbers_keep_their_bits(bits: int) -> None:
    value = np.array(bits, np.uint32).view(np.float32)
    if not np.isfinite(value):
        with pytest.raises(ExpressionError):
            Number(float(value))
        return
    text = Program((Statement("y0", Number(float(value))),)).text()
    (statement,) = parse(text).statements
    assert isinstance(statement.term, Number)
    assert np.float32(statement.term.value).tobytes() == value.tobytes()


@given(bits=st.integers(0, 0x7F7FFFFE), digits=st.integers(20, 60), above=st.booleans())
@settings(max_examples=100)
def test_decimals_beside_the_middle_of_two_numbers_go_to_the_nearest(bits: int, digits: int, above: bool) -> None:
    """In float64 they are the middle itself."""
    low, high = (float(np.array(one, np.uint32).view(np.float32)) for one in (bits, bits + 1))
    middle = Decimal((low + high) / 2)
    with localcontext(prec=300):
        near = middle + (1 if above else -1) * middle.scaleb(-digits)
    (statement,) = parse(f"y0 = {near:.80e}").statements
    assert statement.term == Number(high if above else low)


def test_zeros_of_both_signs_are_different_numbers() -> None:
    assert Number(0.0) != Number(-0.0)
    (y0, y1, _) = run_body(Sample([torch.ones(2)], {"expression": "y0 = Div(x0, 0.0); y1 = Div(x0, -0.0)"}))
    assert y0.tolist() == [torch.inf] * 2 and y1.tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("expression, message", samples.BAD.items(), ids=range(len(samples.BAD)))
def test_what_is_no_expression_is_refused(expression: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        parse(expression)
    wanted = r"Pointwise \(node 'node'\): expression is .*"
    with pytest.raises(ArgumentError, match=wanted) as caught:
        inferred(OP, (FLOAT, (2, 3)), (FLOAT, (3,)), (FLOAT, (2, 1)), expression=expression)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_long_texts_are_refused_in_a_short_line() -> None:
    for text in ("y0 = " + "Neg(" * 100_000, "y0 = " + "a" * 100_000, "y0 = 1e" + "9" * 100_000):
        with pytest.raises(ArgumentError) as caught:
            parse(text)
        assert len(str(caught.value)) < 200
    deep = Name("x0")
    for _ in range(5000):
        deep = Apply("Neg", (deep,))  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match="of more than 64 operators"):
        Program((Statement("y0", deep),))


def test_as_many_operators_and_values_as_are_allowed() -> None:
    assert len(parse(f"y0 = {'Neg(' * 64}x0{')' * 64}").instructions) == 64
    many = [f"t{index} = Neg(x0)" for index in range(16)]
    text = "; ".join([*many, "y0 = " + "Add(" * 15 + "t0" + "".join(f", t{index})" for index in range(1, 16))])
    assert parse(text).most_live == 16


def test_shapes() -> None:
    expression = "y0 = Add(x0, x1); y2 = x0"
    assert inferred(OP, (FLOAT, ("N", 3)), (FLOAT, (3,)), expression=expression) == [
        (FLOAT, ("N", 3)),
        (FLOAT, (0,)),
        (FLOAT, ("N", 3)),
    ]
    # x1 must not make the result larger than x0, so that its sizes are those of x0.
    assert inferred(OP, (HALF, ("N", None, 1)), (HALF, (7, 4, 1)), expression=expression)[0] == (HALF, (7, 4, 1))
    assert inferred(OP, (FLOAT, ("N", 3)), (FLOAT, ("M", 1)), expression=expression)[0] == (FLOAT, ("N", 3))
    assert inferred(OP, (FLOAT, ()))[0] == (FLOAT, ())


ADD, DROP = {"expression": "y0 = Add(x0, x1)"}, {"expression": "y0 = Where(Kept(), x0, 0.0)"}
SEED = (INT64, ())


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        (((2, 3), (4, 5)), ADD, r"x1 is of shape \(4, 5\); expected one that broadcasts to \(2, 3\), the shape of x0"),
        (((2, 3), (2, 2, 3)), ADD, r"x1 is of shape \(2, 2, 3\); expected one that broadcasts to \(2, 3\)"),
        (((2, 3), (1, 1, 1)), ADD, r"x1 is of shape \(1, 1, 1\); expected one that broadcasts to \(2, 3\)"),
        (((1, 3), (2, 3)), ADD, r"x1 is of shape \(2, 3\); expected one that broadcasts to \(1, 3\)"),
        (((1,) * 9,), {}, "x0 is of rank 9; expected at most rank 8"),
        (((2, 3),), ADD, "x1 is absent; expected a tensor, as expression reads it"),
        (((2, 3), (3,), (3,)), ADD, "x2 is given; expected absent, as expression does not read it"),
        (((2, 3),), DROP, r"seed is absent; expected a tensor, as expression has Kept\(\)"),
        (
            ((2, 3), *[None] * 7, ()),
            {"expression": "y0 = x0"},
            r"seed is given; expected absent, as expression has no Kept\(\)",
        ),
        (((2, 3), *[None] * 8, ()), {}, r"drawn is given; expected absent, as expression has no Kept\(\)"),
        (((2, 3),), {"dropout_threshold": 5}, r"dropout_threshold is 5; expected 0, as expression has no Kept\(\)"),
        (((2, 3),), {"draw": 2}, r"draw is 2; expected 0, as expression has no Kept\(\)"),
        (
            ((2, 3), *[None] * 7, ()),
            {**DROP, "dropout_threshold": 2**31},
            "dropout_threshold is 2147483648; expected 0 to 2147483647",
        ),
        (((2, 3), *[None] * 7, (2,)), DROP, r"seed is of shape \(2\); expected shape \(\) or \(1\)"),
    ],
)
def test_refusals(inputs: tuple[Any, ...], attributes: dict[str, Any], message: str) -> None:
    described = [
        None if shape is None else (FLOAT if index < 8 else INT64, shape) for index, shape in enumerate(inputs)
    ]
    with pytest.raises(ArgumentError, match=message):
        inferred(OP, *described, **attributes)


@given(rng=randoms, shape=st.lists(st.integers(1, 4), max_size=3))
@settings(max_examples=20, deadline=None)
def test_values_are_those_of_exact_numbers_but_for_roundings(rng: random.Random, shape: list[int]) -> None:
    sample = samples.random_arguments(rng, samples.random_expression(rng, samples.ANY), shape)
    samples.assert_within(run_body(sample), sample)


# onnxruntime's Where makes 0.0 of a -0.0 that it selects by a condition that holds: nothing may divide by it.
@pytest.mark.parametrize(
    ("operators", "backend"),
    [
        (tuple(name for name in samples.QUOTIENTS if name != "Where"), "onnxruntime"),
        (samples.QUOTIENTS, "reference"),
        (samples.ORDERS, "onnxruntime"),
    ],
    ids=["quotients", "quotients of what is selected", "orders"],
)
@given(rng=randoms, shape=st.lists(st.integers(1, 4), max_size=3))
@settings(max_examples=20, deadline=None)
def test_arithmetic_rounds_as_each_operator_by_itself(
    operators: tuple[str, ...], backend: str, rng: random.Random, shape: list[int]
) -> None:
    """PyTorch's operators, one after the other in float32."""
    sample = samples.random_arguments(rng, samples.random_expression(rng, operators), shape)
    exact = samples.pointwise(*sample.inputs, **sample.attributes, dtype=torch.float32)
    for output, expected in zip(run_body(sample, backend), exact, strict=True):
        assert torch.equal(output.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(output.isnan(), expected.isnan())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drawn", (None, 3))
def test_the_dropout_is_that_of_exported_steps(backend: str, drawn: int | None) -> None:
    x = torch.ones(3, 50)
    inputs = [x, *[None] * 7, torch.tensor([11]), *([] if drawn is None else [torch.tensor(drawn)])]
    attributes = {**DROP, "dropout_threshold": round(0.3 * 2**31), "draw": 4}
    dropped = run_body(Sample(inputs, attributes), backend)[0]
    assert torch.equal(dropped != 0, dropout.mask(11, 4 + (drawn or 0), x, 0.3))
    assert torch.equal(run_body(Sample(inputs, {**attributes, "dropout_threshold": 0}), backend)[0], x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape, other", [((1, 3), (2, 3)), ((1,), (4,))])
@pytest.mark.parametrize("expression", ["y0 = Add(x0, x1)", "y0 = Neg(x1)"])
def test_the_body_gives_no_more_than_x0_has(
    backend: str, shape: tuple[int, ...], other: tuple[int, ...], expression: str
) -> None:
    """Sizes that are known at run time only."""
    with pytest.raises(Exception, match=r"(?i)reshape"):
        run_body(Sample([torch.ones(shape), torch.ones(other)], {"expression": expression}), backend)


def test_equal_expressions_share_a_body_and_others_have_overloads() -> None:
    texts = ["y0 = Neg(x0)", "y0=Neg( x0 );", "y0 = Abs(x0)", "y0 = Neg(x0); y1 = 2"]
    nodes = [
        helper.make_node(OP, ["x"], [f"out{k}", f"y1_{k}", f"y2_{k}"], domain=DOMAIN, expression=text)
        for k, text in enumerate(texts)
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["N"])],
        [helper.make_tensor_value_info(f"out{k}", FLOAT, ["N"]) for k in range(len(texts))],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    model = with_bodies(helper.make_model(graph, opset_imports=imports, ir_version=10))
    overloads = [node.overload for node in model.graph.node]
    assert overloads[:2] == ["", ""] and len(set(overloads)) == 3
    assert all(name.isidentifier() or name[0].isdigit() for name in overloads[2:]) and max(map(len, overloads)) < 30
    again = with_bodies(model)
    assert again.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.array([1.0, -2.0], np.float32)
    for found, expected in zip(session.run(None, {"x": x}), (-x, -x, np.abs(x), -x), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_overloads_are_the_same_in_every_process() -> None:
    expression = "y0 = Neg(x0)"
    models = [one_node(OP, [(FLOAT, ["N"])], {"expression": expression}) for _ in range(2)]
    for model in models:
        node = helper.make_node(OP, ["x0"], ["z", "z1", "z2"], domain=DOMAIN, expression="y0 = Exp(x0)")
        twin = helper.make_node(OP, ["x0"], ["w", "w1", "w2"], domain=DOMAIN, expression="y0 = Exp(x0)")
        model.graph.node.extend([node, twin])
    (overload,) = {ir.from_proto(with_bodies(model)).graph[0].overload for model in models}
    assert overload == "02445f93083719f8_of_x0"


def test_the_body_of_a_product_with_a_quotient_of_1_loads() -> None:
    """onnxruntime's optimizer, which makes one division of the two, loses a Cast on the way."""
    x, y = (torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) + 0.5 for seed in (0, 1))
    (got, *_) = run(OP, "onnxruntime", x, y, ranks=[2, 1, 1], expression="y0 = Mul(x1, Div(1.0, x0))")
    torch.testing.assert_close(got, y / x)
