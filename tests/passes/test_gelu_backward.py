"""Gradients of Gaussian error linear units, as several producers write them, become one operator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from producers import run
from torch import Tensor, nn

import gradfuse
from gradfuse import fuse
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

ERF = """
    half = Constant<value_float = 0.5>()  one = Constant<value_float = 1.0>()
    minus_half = Constant<value_float = -0.5>()
    root = Constant<value_float = 0.70710677>()  scale = Constant<value_float = 0.3989423>()
    scaled = Mul(x, root)  e = Erf(scaled)  raised = Add(e, one)  share = Mul(raised, half)
    square = Mul(x, x)  exponent = Mul(square, minus_half)  bell = Exp(exponent)  density = Mul(bell, scale)
    moved = Mul(x, density)  slope = Add(share, moved)
    dx = Mul(g, slope)
"""
TANH = """
    half = Constant<value_float = 0.5>()  one = Constant<value_float = 1.0>()  three = Constant<value_float = 3.0>()
    scale = Constant<value_float = 0.7978846>()  cubic = Constant<value_float = 0.044715>()
    cube = Pow(x, three)  bent = Mul(cube, cubic)  sum = Add(x, bent)  inner = Mul(sum, scale)  t = Tanh(inner)
    raised = Add(t, one)  share = Mul(raised, half)
    square = Mul(x, x)  thrice = Mul(square, three)  bend = Mul(thrice, cubic)  steeper = Add(bend, one)
    steep = Mul(steeper, scale)  tt = Mul(t, t)  rest = Sub(one, tt)  product = Mul(rest, steep)
    half_x = Mul(x, half)  moved = Mul(half_x, product)  slope = Add(share, moved)
    dx = Mul(g, slope)
"""

SIGMOID = TANH.replace(
    "t = Tanh(inner)", "double = Add(inner, inner) s = Sigmoid(double) two = Add(s, s) t = Sub(two, one)"
)


def graph(text: str, shapes: str = "float[N, 6] g, float[N, 6] x, float[N, 6] z, float[6] row") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> unit ({shapes}) => (float[N, 6] dx) {{ {text} }}'
    )


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == "aclnn"]


def by_torch(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    out: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return out


IN_EXPONENTIALS = [
    changed(TANH, ("tt = Mul(t, t)  rest = Sub(one, tt)", rest))
    for rest in (
        "high = Cosh(inner)  square_of_high = Mul(high, high)  rest = Reciprocal(square_of_high)",
        "high = Cosh(inner)  low = Div(one, high)  rest = Mul(low, low)",
        """up = Exp(inner)  negative = Neg(inner)  down = Exp(negative)  both = Add(up, down)
        four = Constant<value_float = 4.0>()  squared = Mul(both, both)  rest = Div(four, squared)""",
    )
]
OWN_SIGMOID = changed(
    SIGMOID,
    ("s = Sigmoid(double)", "negative = Neg(double)  e = Exp(negative)  below = Add(one, e)  s = Reciprocal(below)"),
)
OF_OPPOSITES = [
    changed(ERF, ("e = Erf(scaled)  raised = Add(e, one)", "back = Neg(scaled) e = Erf(back)  raised = Sub(one, e)")),
    changed(TANH, ("t = Tanh(inner)", "back = Neg(inner)  opposite = Tanh(back)  t = Neg(opposite)")),
    changed(SIGMOID, ("s = Sigmoid(double)", "back = Neg(double)  left = Sigmoid(back)  s = Sub(one, left)")),
]


@pytest.mark.parametrize(
    "text, approximate",
    [
        *((text, "none") for text in (ERF, OF_OPPOSITES[0])),
        *((text, "tanh") for text in (TANH, SIGMOID, OWN_SIGMOID, *IN_EXPONENTIALS, *OF_OPPOSITES[1:])),
    ],
)
def test_slopes_are_found(text: str, approximate: str) -> None:
    found = fuse(graph(text)).model
    assert [node.op_type for node in found.graph.node] == ["GeluBackward"]
    numbers = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    grad, x = 2 * numbers
    feeds = {"g": grad.numpy(), "x": x.numpy(), "z": x.numpy(), "row": np.zeros(6, np.float32)}
    dx = run(found, feeds)["dx"]
    exact = by_torch(grad.double(), x.double(), approximate)
    assert_gradients_close(dx, by_torch(grad, x, approximate), exact, torch.float32)


@pytest.mark.parametrize("text", [TANH, OWN_SIGMOID, *IN_EXPONENTIALS])
def test_slopes_at_a_sum_with_a_bias_are_found(text: str) -> None:
    model = graph(f"x = Add(z, row)  {text}", "float[N, 6] g, float[N, 6] z, float[6] row")
    assert operators(fuse(model).model) == ["GeluBackward"]


@pytest.mark.parametrize(
    "changes",
    [
        [
            ("Constant<value_float = 0.70710677>()", "Constant<value_float = 1.4142135>()"),
            ("Mul(x, root)", "Div(x, root)"),
        ],
        [("dx = Mul(g, slope)", "a = Mul(g, share)  b = Mul(g, moved)  dx = Add(b, a)")],
        [
            (
                "square = Mul(x, x)  exponent = Mul(square, minus_half)",
                "square = Mul(scaled, scaled)  exponent = Neg(square)",
            )
        ],
    ],
)
def test_slopes_are_found_however_they_are_written(changes: list[tuple[str, str]]) -> None:
    assert operators(fuse(graph(changed(ERF, *changes))).model) == ["GeluBackward"]


@pytest.mark.parametrize(
    "text",
    [
        changed(ERF, ("0.70710677", "0.7072")),
        changed(ERF, ("Mul(x, root)", "Mul(z, root)")),
        changed(ERF, ("Mul(x, density)", "Mul(z, density)")),
        changed(ERF, ("Mul(x, x)", "Mul(x, z)")),
        changed(ERF, ("-0.5", "-0.50001")),
        changed(ERF, ("0.3989423", "0.3979423")),
        changed(ERF, ("Add(share, moved)", "Sub(share, moved)")),
        changed(ERF, ("Add(share, moved)", "Identity(moved)")),
        changed(ERF, ("Erf(scaled)", "Tanh(scaled)")),
        changed(ERF, ("Mul(g, slope)", "Add(g, slope)")),
        changed(SIGMOID, ("Sigmoid(double)", "Sigmoid(inner)")),
        changed(TANH, ("0.7978846", "0.7979")),
        changed(TANH, ("0.044715", "0.0447")),
        changed(TANH, ("Mul(t, t)", "Mul(t, x)")),
        changed(TANH, ("Mul(t, t)", "Identity(t)")),
        changed(TANH, ("Mul(square, three)", "Identity(square)")),
        changed(TANH, ("half_x = Mul(x, half)", "half_x = Mul(z, half)")),
        changed(TANH, ("Pow(x, three)", "Pow(z, three)")),
        changed(TANH, ("Add(t, one)", "Sub(t, one)")),
        changed(IN_EXPONENTIALS[0], ("Cosh(inner)", "Cosh(x)")),
        changed(IN_EXPONENTIALS[0], ("Mul(high, high)", "Mul(high, x)")),
        changed(IN_EXPONENTIALS[1], ("Cosh(inner)", "Sinh(inner)")),
        changed(IN_EXPONENTIALS[2], ("4.0", "3.9")),
        changed(IN_EXPONENTIALS[2], ("Add(up, down)", "Sub(up, down)")),
        changed(OWN_SIGMOID, ("Neg(double)", "Neg(inner)")),
    ],
)
def test_what_is_almost_a_slope_stays(text: str) -> None:
    result = fuse(graph(text))
    assert operators(result.model) == []
    assert not any(miss.bug for miss in result.report.near_misses)


@pytest.mark.parametrize("text", [ERF, TANH])
def test_a_gradient_of_another_shape_stays(text: str) -> None:
    """The operator does not broadcast."""
    assert operators(fuse(graph(changed(text, ("Mul(g, slope)", "Mul(row, slope)")))).model) == []


class Gelu(nn.Module):
    """A unit as libraries of models write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "erf":
            return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
        if self.how == "pow":
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


@pytest.mark.parametrize("how", ["erf", "pow", "product"])
def test_units_that_modules_write_out_have_the_operator_in_exported_steps(how: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), Gelu(how), nn.Linear(16, 3))
    batch: Any = ((torch.randn(5, 6),), (torch.randint(3, (5,)),))
    step = gradfuse.export_training_step(module, nn.functional.cross_entropy, batch)
    assert operators(step.model) == ["CrossEntropyLossGrad", "GeluBackward"]


@pytest.mark.parametrize(("op", "approximate"), [("BiasGeluGrad_dX", "none"), ("BiasFastGeluGrad_dX", "tanh")])
def test_the_operators_of_onnxruntime_training_with_a_bias(op: str, approximate: str) -> None:
    text = f"dx = com.microsoft.{op}(g, x, row)"
    model = graph(text, "float[N, 6] g, float[N, 6] x, float[6] row")
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    result = fuse(model, policy="all")
    assert operators(result.model) == ["GeluBackward"], result.report
    numbers = np.random.default_rng(0)
    sizes = {"g": (5, 6), "x": (5, 6), "row": (6,)}
    feeds = {name: numbers.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    grad, x, bias = (torch.from_numpy(feeds[name]) for name in ("g", "x", "row"))
    exact, native = (by_torch(grad.to(d), x.to(d) + bias.to(d), approximate) for d in (torch.float64, torch.float32))
    assert_gradients_close(run(result.model, feeds)["dx"], native.numpy(), exact.numpy(), np.float32)


@pytest.mark.parametrize(("text", "approximate"), [(ERF, "none"), (TANH, "tanh")])
def test_several_gradients_along_the_last_dimension(text: str, approximate: str) -> None:
    """onnx-ad has one for each of its seeds."""
    several = changed(
        text,
        (
            "dx = Mul(g, slope)",
            "last = Constant<value_ints = [-1]>() column = Unsqueeze(slope, last) dx = Mul(g, column)",
        ),
    )
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> unit (float[N, 6, K] g, float[N, 6] x) => (float[N, 6, K] dx) '
        f"{{ {several} }}"
    )
    result = fuse(model, policy="all")
    assert operators(result.model) == ["GeluBackward"], result.report
    numbers = np.random.default_rng(0)
    for count in (1, 3):
        feeds = {
            name: numbers.standard_normal(size).astype(np.float32)
            for name, size in {"g": (5, 6, count), "x": (5, 6)}.items()
        }
        grad, x = torch.from_numpy(feeds["g"]), torch.from_numpy(feeds["x"]).unsqueeze(-1).expand(-1, -1, count)
        exact, native = (by_torch(grad.to(d), x.to(d), approximate) for d in (torch.float64, torch.float32))
        assert_gradients_close(run(result.model, feeds)["dx"], native.numpy(), exact.numpy(), np.float32)


@pytest.mark.parametrize(("text", "approximate"), [(ERF, "none"), (TANH, "tanh")])
def test_what_the_input_is_made_of_may_be_read_beside_it(text: str, approximate: str) -> None:
    of_x = "half_x = Mul(x, half)" if approximate == "tanh" else "moved = Mul(x, density)"
    parts = "half_z = Mul(z, half) half_row = Mul(row, half) half_x = Add(half_z, half_row)"
    if approximate == "none":
        parts = "moved_z = Mul(z, density) moved_row = Mul(row, density) moved = Add(moved_z, moved_row)"
    made = "x = Add(z, row)" + changed(text, (of_x, parts))
    model = graph(made, "float[N, 6] g, float[N, 6] z, float[6] row")
    result = fuse(model, policy="all")
    assert operators(result.model) == ["GeluBackward"], result.report
    numbers = np.random.default_rng(0)
    sizes = {"g": (5, 6), "z": (5, 6), "row": (6,)}
    feeds = {name: numbers.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    grad, z, row = (torch.from_numpy(feeds[name]) for name in sizes)
    exact, native = (by_torch(grad.to(d), z.to(d) + row.to(d), approximate) for d in (torch.float64, torch.float32))
    assert_gradients_close(run(result.model, feeds)["dx"], native.numpy(), exact.numpy(), np.float32)
