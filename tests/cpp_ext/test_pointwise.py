"""The kernel of Pointwise: the bits of separate operators, blocks and broadcasts, threads, dropout, and refusals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import backends
import numpy as np
import pytest
import torch
from cpp_ext.single_node import CPU, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES, Sample
from operators import pointwise as samples
from torch import Tensor

from cpp_ext import capi
from gradfuse.custom_ops.pointwise_expressions import ExpressionError, parse
from gradfuse.export import dropout
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("device")
on_cpu = pytest.mark.parametrize("device", [CPU], indirect=True)

OP = "Pointwise"

randoms = st.randoms(use_true_random=False)
shapes = st.sampled_from(
    [(), (1,), (7,), (17, 3), (3, 17), (2, 3, 33), (1, 129), (515,), (5, 1, 7, 9), (257, 4), (1025,), (2, 2, 2100)]
)


def kernel(sample: Sample, threads: int = 1) -> list[Tensor]:
    return run(OP, *sample.inputs, threads=threads, **sample.attributes)


def nodes(sample: Sample) -> list[Tensor]:
    """What onnxruntime's own nodes give."""
    ranks = [one.dim() for one in samples.pointwise(*sample.inputs, **sample.attributes)]
    return backends.run(OP, "onnxruntime", *sample.inputs, ranks=ranks, **sample.attributes)


def assert_same_numbers(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Assert that all are the same; zeros of both signs are, and NaN of any bits."""
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@on_cpu
@pytest.mark.parametrize("operators", [samples.QUOTIENTS, samples.ORDERS], ids=["quotients", "orders"])
@given(rng=randoms, shape=shapes)
@settings(max_examples=30, deadline=None)
def test_arithmetic_has_the_bits_of_separate_nodes(
    operators: tuple[str, ...], rng: random.Random, shape: tuple[int, ...]
) -> None:
    sample = samples.random_arguments(rng, samples.random_expression(rng, operators), shape)
    assert_same_numbers(kernel(sample), nodes(sample))


@given(rng=randoms, shape=shapes)
@settings(max_examples=25, deadline=None)
def test_values_are_those_of_exact_numbers_but_for_roundings(rng: random.Random, shape: tuple[int, ...]) -> None:
    sample = samples.random_arguments(rng, samples.random_expression(rng, samples.ANY), shape)
    samples.assert_within(kernel(sample), sample)


@pytest.mark.parametrize("name", ["Exp", "Log", "Erf", "Tanh", "Sigmoid"])
def test_functions_are_right_everywhere(name: str) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.cat(
        [torch.linspace(-20, 20, 40_001), torch.logspace(-37, 37, 4_001), torch.tensor([inf, -inf, nan, -0.0])]
    )
    sample = Sample([x], {"expression": f"y0 = {name}(x0)"})
    native, exact = (
        samples.pointwise(*sample.inputs, **sample.attributes, dtype=t)[0] for t in (x.dtype, torch.float64)
    )
    out = kernel(sample)[0]
    # By magnitude, as the bound grows with the largest of all.
    for low, high in ((0, 1e-30), (1e-30, 1e-6), (1e-6, 1e-2), (1e-2, 2), (2, 1e9), (1e9, inf)):
        part = (exact.abs() >= low) & (exact.abs() < high)
        assert_gradients_close(out[part], native[part], exact[part], torch.float32)
    special = ~exact.isfinite()
    assert_gradients_close(out[special], native[special], exact[special], torch.float32)


@on_cpu
def test_tiny_numbers_are_not_flushed_by_arithmetic() -> None:
    tiny = torch.tensor([1e-40, -1e-45, 3e-39, 1.2e-38, 2e-38, 0.0])
    x, y = (one.flatten() for one in torch.meshgrid(tiny, tiny, indexing="ij"))
    expression = "y0 = Sub(x0, Mul(x1, 0.5)); y1 = Where(Less(x0, x1), Max(x0, 1e-44), Neg(x0)); y2 = Div(x0, 3.0)"
    sample = Sample([x, y], {"expression": expression})
    expected = samples.pointwise(*sample.inputs, **sample.attributes, dtype=torch.float32)
    assert_same_numbers(kernel(sample), expected)
    assert expected[0].abs().min() == 0 and (expected[2] != 0).any()


PATTERNS = [
    ((1000, 3), [(3,), (1000, 1), (1, 3)]),
    ((3, 1000), [(1000,), (3, 1), (1, 1)]),
    ((2, 3, 5, 64), [(2, 1, 1, 64), (3, 1, 64), (5, 64), (2, 1, 5, 1), (1, 3, 1, 1)]),
    ((7, 4, 300), [(7, 1, 300), (4, 1), (7, 1, 1), (1,), ()]),
    ((2, 1, 3, 2, 1, 2, 3, 5), [(2, 1, 1, 2, 1, 1, 3, 1), (3, 1, 1, 2, 1, 5), (1, 1, 3, 1)]),
    ((1, 1), [(1,), (), (1, 1)]),
]


@pytest.mark.parametrize("shape, others", PATTERNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_broadcasts_of_all_kinds(shape: tuple[int, ...], others: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
    """Alone, and with each other."""
    for chosen in ([one] for one in (*others, shape)):
        check_broadcasts(shape, chosen, dtype)
    check_broadcasts(shape, others, dtype)


def check_broadcasts(shape: Sequence[int], others: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
    term = "x0"
    for index in range(len(others)):
        term = f"{'Sub' if index % 2 else 'Mul'}({term}, x{index + 1})"
    expression = f"y1 = x{len(others)}; y0 = {term}; y2 = Neg(x1)"
    sample = samples.arguments(expression, dtype, shape, *others)
    exact = samples.pointwise(*sample.inputs, **sample.attributes, dtype=torch.float32)
    assert_same_numbers(kernel(sample), [one.to(dtype) for one in exact])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 257, 511, 1023, 1025, 2047, 2049, 4095, 4097, 8193])
def test_lengths_around_blocks(length: int) -> None:
    for shape, other in (((length,), (length,)), ((2, length), (length,)), ((length, 2), (length, 1))):
        sample = samples.arguments("y0 = Mul(x0, x1); y1 = Add(y0, x0); y2 = Sub(y1, x1)", torch.float32, shape, other)
        exact = samples.pointwise(*sample.inputs, **sample.attributes, dtype=torch.float32)
        assert_same_numbers(kernel(sample), exact)


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    cases: list[tuple[str, list[tuple[int, ...]]]] = [
        (samples.SWIGLU_BACKWARD, [(300_007,)] * 3),
        (samples.UNARY, [(1003, 301)]),
        (samples.DROPOUT, [(70_001, 3), (3,), (70_001, 1)]),
        (samples.ROTARY, [(2, 3, 701, 64), (2, 3, 701, 64), (701, 64), (701, 64)]),
    ]
    for expression, sizes in cases:
        sample = samples.arguments(expression, dtype, *sizes)
        first = kernel(sample)
        for threads in (2, 3):
            for one, other in zip(kernel(sample, threads), first, strict=True):
                assert_same_bits(one, other)


def test_the_bits_of_an_element_do_not_depend_on_its_place() -> None:
    x = 3 * torch.randn(300, generator=torch.Generator().manual_seed(0))
    attributes = {"expression": samples.UNARY}
    whole = kernel(Sample([x], attributes))
    for start, end in ((1, 300), (7, 40), (120, 121), (290, 300)):
        for part, expected in zip(kernel(Sample([x[start:end].clone()], attributes)), whole, strict=True):
            assert_same_bits(part, expected[start:end].clone())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    for expression in (samples.GELU, samples.SWIGLU_BACKWARD, samples.BINARY, samples.EVERY):
        count = 8 if expression == samples.EVERY else 3 if "x2" in expression else 2 if "x1" in expression else 1
        sample = samples.arguments(expression, dtype, *((5, 70) for _ in range(count)))
        wide = [one.float() if one is not None and one.dtype == dtype else one for one in sample.inputs]
        for one, other in zip(kernel(sample), kernel(sample.with_inputs(wide)), strict=True):
            assert_same_bits(one, other.to(dtype))


@on_cpu
def test_an_output_may_lie_on_x0() -> None:
    """All of a block is read before it is written, by expressions that assign y0 first."""
    expression = "y0 = Mul(x0, x1); y1 = Add(x0, y0); y2 = Sub(x0, x1)"
    for dtype, shape, other in (
        (torch.float32, (3, 5001), (5001,)), (torch.float16, (3, 5001), (3, 1)), (torch.float32, (20_000, 3), (3,)),
    ):  # fmt: skip
        sample = samples.arguments(expression, dtype, shape, other)
        beside = kernel(sample)
        x0, x1 = (one.clone() for one in sample.inputs if one is not None)
        outputs = [x0, torch.empty_like(x0), torch.empty_like(x0)]
        capi.run(OP, [x0, x1, *[None] * 8], outputs, expression=expression)
        for one, expected in zip(outputs, beside, strict=True):
            assert_same_bits(one, expected)


@pytest.mark.parametrize("shape", [(3, 50), (), (2, 1, 700), (4, 3)])
def test_the_dropout_is_that_of_exported_steps(shape: tuple[int, ...]) -> None:
    x, threshold = torch.ones(shape), round(0.3 * 2**31)
    expression = "k = Kept(); y0 = Where(k, x0, 0.0); y1 = Where(Not(Kept()), 1.0, 2.0)"
    for seed, number, drawn in ((11, 4, None), (-7, 6, torch.tensor([2])), (2**40, 4, torch.tensor(0))):
        inputs = [x, *[None] * 7, torch.tensor(seed), drawn]
        kept, dropped, _ = run(OP, *inputs, expression=expression, dropout_threshold=threshold, draw=4)
        mask = dropout.mask(seed, number, x, 0.3)
        assert torch.equal(kept != 0, mask) and torch.equal(dropped == 2, mask)
        assert torch.equal(run(OP, *inputs, expression=expression, draw=4)[0], x)


def test_as_many_operators_and_values_as_there_may_be() -> None:
    live = "; ".join(f"t{index} = Mul(x0, {index}.5)" for index in range(16))
    folded = "Sub(" * 15 + "t0" + "".join(f", t{index})" for index in range(1, 16))
    deep = "Add(x1, " * 32 + "x0" + ")" * 32
    for expression in (f"{live}; y0 = {folded}; y1 = {deep}", f"y0 = {'Neg(' * 64}x0{')' * 64}"):
        sample = samples.arguments(expression, torch.float32, (2, 600), *([(600,)] if "x1" in expression else []))
        exact = samples.pointwise(*sample.inputs, **sample.attributes, dtype=torch.float32)
        assert_same_numbers(kernel(sample), exact)


@on_cpu
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), digits=st.integers(1, 30))
@settings(max_examples=15, deadline=None)
def test_numbers_are_those_that_python_reads(bits: list[int], digits: int) -> None:
    values = [float(np.nan_to_num(np.array(one, np.uint32).view(np.float32), nan=1.5)) for one in bits]
    texts = [f"{values[0]:.{digits}e}", str(np.float32(values[1])), f"{values[2]:.9e}"]
    try:
        program = parse("; ".join(f"y{index} = {text}" for index, text in enumerate(texts)))
    except ExpressionError:
        return  # rounded beyond the largest
    outputs = run(OP, torch.zeros(1), expression=program.text())
    for output, statement in zip(outputs, program.statements, strict=True):
        assert_same_bits(output, torch.tensor([float(str(statement.term))], dtype=torch.float32))


def mutated(rng: random.Random, text: str) -> str:
    """A text that is another by few characters."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", text[at] * 2, rng.choice("xyt01 9.,;=()-+eAbs_ N")]) + text[at + 1 :]
    return text


@on_cpu
@given(rng=randoms)
@settings(max_examples=60, deadline=None)
def test_the_library_takes_and_refuses_what_python_does(rng: random.Random) -> None:
    expression = mutated(rng, samples.random_expression(rng, samples.ANY))
    try:
        program = parse(expression)
    except ExpressionError:
        with pytest.raises(Exception, match=r"Pointwise \(node 'node'\): expression is .*; expected "):
            run(OP, *[torch.ones(2)] * 4, expression=expression)
        return
    sample = samples.random_arguments(rng, program.text(), (3,))
    samples.assert_within(kernel(Sample(sample.inputs, {**sample.attributes, "expression": expression})), sample)


@pytest.mark.parametrize("expression", samples.BAD, ids=range(len(samples.BAD)))
def test_what_is_no_expression_is_refused_with_the_words_of_python(expression: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(expression)
    message = f"expression is {caught.value.got}; expected {caught.value.wanted}"
    assert_refused(OP, message, [torch.zeros(2, 3), torch.zeros(3), torch.zeros(3)], {"expression": expression})


X, SEED = torch.zeros(2, 3), torch.tensor(1)
ADD, DROP = {"expression": "y0 = Add(x0, x1)"}, {"expression": "y0 = Where(Kept(), x0, 0.0)"}


@pytest.mark.parametrize(
    "inputs, attributes, message",
    [
        ([X, torch.zeros(4, 5)], ADD, "x1 is of shape (4, 5); expected one that broadcasts to (2, 3), the shape of x0"),
        ([X, X[None]], ADD, "x1 is of shape (1, 2, 3); expected one that broadcasts to (2, 3), the shape of x0"),
        ([X[:1], X], ADD, "x1 is of shape (2, 3); expected one that broadcasts to (1, 3), the shape of x0"),
        ([X], ADD, "x1 is absent; expected a tensor, as expression reads it"),
        ([X, X, X], ADD, "x2 is given; expected absent, as expression does not read it"),
        ([X], DROP, "seed is absent; expected a tensor, as expression has Kept()"),
        ([X, *[None] * 7, SEED], {}, "seed is given; expected absent, as expression has no Kept()"),
        ([X, *[None] * 8, SEED], {}, "drawn is given; expected absent, as expression has no Kept()"),
        ([X], {"dropout_threshold": 5}, "dropout_threshold is 5; expected 0, as expression has no Kept()"),
        ([X], {"draw": 2}, "draw is 2; expected 0, as expression has no Kept()"),
    ],
)  # fmt: skip
def test_bad_arguments(inputs: list[Tensor | None], attributes: dict[str, Any], message: str) -> None:
    assert_refused(OP, message, inputs, attributes)


def test_a_sample_reaches_every_operator() -> None:
    text = " ".join(str(sample.attributes["expression"]) for sample in SAMPLES[OP].all_typical(torch.float32))
    assert all(f"{name}(" in text for name in itertools.chain(samples.ANY, ("Not", "And", "Or", "Kept")))
