"""Updates of SGD, however they are written, become ApplySgd; updates that are almost its own stay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from producers import run

import gradfuse
from gradfuse import fuse, optimizers
from gradfuse.passes.report import Report
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

Array = npt.NDArray[Any]
SHAPE = (3, 5)

DIRECTIONS = {
    "gradient": "d = Identity(g)",
    "momentum": "kept = Mul(b, mu) buffer = Add(kept, g) d = Identity(buffer)",
    "nesterov": "kept = Mul(mu, b) buffer = Add(g, kept) ahead = Mul(buffer, mu) d = Add(g, ahead)",
}
STEPS = {
    "product": "way = Mul(d, rate) moved = Sub(p, way)",
    "negative rate": "back = Neg(rate) way = Mul(back, d) moved = Add(way, p)",
    "two rates": "own = Mul(rate, second) way = Mul(own, d) moved = Sub(p, way)",
    "decaying rate": """base = Constant<value_float = 0.99>() power = Pow(base, second) own = Mul(rate, power)
        way = Mul(d, own) moved = Sub(p, way)""",
    "warmed rate": """half = Constant<value_float = 0.5>() far = Add(second, half) turned = Cos(far)
        above = Add(turned, half) own = Mul(above, rate) back = Neg(own) way = Mul(back, d) moved = Add(p, way)""",
    "constant rate": "small = Constant<value_float = 0.05>() way = Mul(d, small) moved = Sub(p, way)",
}
SCALES = {
    "": "scaled = Identity(gradient)",
    "factor": "scaled = Mul(gradient, factor)",
    "divisor": "scaled = Div(gradient, factor)",
    "maximize": "scaled = Neg(gradient)",
}


@dataclasses.dataclass(frozen=True)
class Update:
    """One way to write the update, and its options."""

    direction: str = "momentum"
    step: str = "product"
    scale: str = ""
    momentum: float = 0.9
    weight_decay: float = 0.0
    changed: tuple[tuple[str, str], ...] = ()
    """Replacements in the text, which make it another update."""

    def model(self) -> onnx.ModelProto:
        nodes = [
            f"mu = Constant<value = float {{{self.momentum!r}}}>()",
            f"decay = Constant<value = float {{{self.weight_decay!r}}}>()",
            SCALES[self.scale],
            "penalty = Mul(p, decay) g = Add(scaled, penalty)" if self.weight_decay else "g = Identity(scaled)",
            DIRECTIONS[self.direction],
            STEPS[self.step],
        ]
        text = "\n".join(nodes)
        for old, new in self.changed:
            assert old in text
            text = text.replace(old, new)
        tensor = f"float[{','.join(map(str, SHAPE))}]"
        inputs = [f"{tensor} {name}" for name in ("p", "gradient", "b")]
        inputs += [f"float {name}" for name in ("rate", "factor", "second")]
        outputs = [f"{tensor} moved", *([f"{tensor} buffer"] if self.direction != "gradient" else [])]
        signature = f"update ({', '.join(inputs)}) => ({', '.join(outputs)})"
        return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {signature} {{ {text} }}')


def feeds(seed: int = 0) -> dict[str, Array]:
    numbers = np.random.default_rng(seed)
    tensors = {name: numbers.standard_normal(SHAPE).astype(np.float32) for name in ("p", "gradient", "b")}
    return tensors | {k: np.asarray(x, np.float32) for k, x in {"rate": 0.01, "factor": 0.7, "second": 1.3}.items()}


def of_torch(update: Update, given: Mapping[str, Array], dtype: torch.dtype) -> dict[str, Array]:
    """The update by torch.optim."""
    tensors = {name: torch.from_numpy(given[name].copy()).to(dtype) for name in ("p", "gradient", "b")}
    factor, rate = float(given["factor"]), float(given["rate"])
    scale = {"": 1.0, "factor": factor, "divisor": 1 / factor, "maximize": -1.0}
    second = float(given["second"])
    rates = {
        "two rates": rate * second,
        "decaying rate": rate * float(np.float32(0.99)) ** second,
        "warmed rate": rate * (math.cos(second + 0.5) + 0.5),
        "constant rate": float(np.float32(0.05)),
    }
    parameter = torch.nn.Parameter(tensors["p"])
    parameter.grad = tensors["gradient"] * scale[update.scale]
    momentum = 0.0 if update.direction == "gradient" else float(np.float32(update.momentum))
    optimizer = torch.optim.SGD(
        [parameter],
        lr=rates.get(update.step, rate),
        momentum=momentum,
        weight_decay=float(np.float32(update.weight_decay)),
        nesterov=update.direction == "nesterov",
    )
    if momentum:
        optimizer.state[parameter] = {"momentum_buffer": tensors["b"]}
    optimizer.step()
    results = {"moved": parameter.detach().numpy()}
    return results | ({"buffer": optimizer.state[parameter]["momentum_buffer"].numpy()} if momentum else {})


def fused(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Report]:
    result = fuse(model, policy="all", check=0)
    onnx.checker.check_model(result.model, full_check=True)
    return result.model, result.report


def operators(report: Report) -> list[str]:
    return [fusion.op for fusion in report.fusions]


# With equal numbers in all elements, the proof meets a step that is the parameter but for five digits.
@example(Update(direction="momentum", step="product", scale="", momentum=0.123, weight_decay=0.1))
@example(Update(direction="gradient", step="decaying rate"))
@example(Update(direction="nesterov", step="warmed rate", weight_decay=0.1))
@settings(max_examples=16, deadline=None)
@given(
    st.builds(
        Update,
        direction=st.sampled_from(list(DIRECTIONS)),
        step=st.sampled_from(list(STEPS)),
        scale=st.sampled_from(list(SCALES)),
        momentum=st.sampled_from([0.9, 0.5, 0.123]),
        weight_decay=st.sampled_from([0.0, 0.1, 1e-4]),
    )
)
def test_any_options(update: Update) -> None:
    model, report = fused(update.model())
    assert operators(report) == ["ApplySgd"], report
    (node,) = (node for node in model.graph.node if node.domain == "aclnn")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["nesterov"] == (update.direction == "nesterov")
    assert attributes["momentum"] == (0 if update.direction == "gradient" else np.float32(update.momentum))
    for seed in range(3):
        given_values = feeds(seed)
        exact, native = (of_torch(update, given_values, dtype) for dtype in (torch.float64, torch.float32))
        results = run(model, given_values)
        for name, wanted in exact.items():
            assert_gradients_close(results[name], native[name], wanted, np.float32)


VELOCITIES = {
    "": "way = Mul(g, rate) velocity = Sub(kept, way)",
    "rate first": "way = Mul(rate, g) velocity = Sub(kept, way)",
    "negative rate": "back = Neg(rate) way = Mul(g, back) velocity = Add(way, kept)",
    "negative gradient": "back = Neg(g) way = Mul(back, rate) velocity = Add(kept, way)",
    "negative way": "step = Mul(g, rate) way = Neg(step) velocity = Sum(kept, way)",
    "constant rate": "small = Constant<value_float = 0.01>() way = Mul(small, g) velocity = Sub(kept, way)",
    "negative constant": "small = Constant<value_float = -0.01>() way = Mul(small, g) velocity = Add(kept, way)",
    "two rates": "own = Mul(rate, second) way = Mul(own, g) velocity = Sub(kept, way)",
    "divided gradient": "part = Div(g, factor) way = Mul(part, rate) velocity = Sub(kept, way)",
}


@pytest.mark.parametrize("nesterov", ["", "ahead first", "parameter first"])
@pytest.mark.parametrize("name", VELOCITIES)
def test_a_velocity_that_has_the_rate_in_it(name: str, nesterov: str) -> None:
    """Keras's momentum: with velocity = -rate * buffer it is the update of torch.optim.SGD."""
    step = "moved = Add(p, velocity)"
    if nesterov:
        joined = "Add" if "velocity = Add" in VELOCITIES[name] or "Sum" in VELOCITIES[name] else "Sub"
        step = f"ahead = Mul(mu, velocity) along = {joined}(ahead, way) moved = Add(along, p)"
        if nesterov == "parameter first":
            step = f"ahead = Mul(mu, velocity) along = Add(p, ahead) moved = {joined}(along, way)"
    text = f"mu = Constant<value_float = 0.9>() g = Identity(gradient) kept = Mul(mu, b) {VELOCITIES[name]} {step}"
    tensor = f"float[{','.join(map(str, SHAPE))}]"
    inputs = ", ".join([*(f"{tensor} {n}" for n in ("p", "gradient", "b")), "float rate, float factor, float second"])
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> f ({inputs}) => ({tensor} moved, {tensor} velocity) {{ {text} }}'
    )
    result, report = fused(model)
    assert operators(report) == ["ApplySgd"], report
    given_values = feeds()
    rate = float(given_values["rate"]) if "constant" not in name else float(np.float32(0.01))
    rate *= float(given_values["second"]) if name == "two rates" else 1
    update = Update(direction="nesterov" if nesterov else "momentum")
    if name == "divided gradient":
        update = dataclasses.replace(update, scale="divisor")
    of_buffer = given_values | {"b": (given_values["b"] / -rate).astype(np.float64), "rate": np.asarray(rate)}
    exact, native = (of_torch(update, of_buffer, dtype) for dtype in (torch.float64, torch.float32))
    results = run(result, given_values)
    assert_gradients_close(results["moved"], native["moved"], exact["moved"], np.float32)
    velocity, exact_velocity = (reference["buffer"] * -rate for reference in (native, exact))
    assert_gradients_close(results["velocity"], velocity, exact_velocity, np.float32)


ALMOST = {
    "steps up": ("momentum", [("moved = Sub(p, way)", "moved = Add(p, way)")]),
    "a rate for each element": ("momentum", [("way = Mul(d, rate)", "way = Mul(d, gradient)")]),
    "the old momentum": ("momentum", [("d = Identity(buffer)", "d = Identity(b)")]),
    "a momentum that shrinks below 0": ("momentum", [("kept = Mul(b, mu)", "less = Neg(mu) kept = Mul(b, less)")]),
    "a momentum that depends on the batch": ("momentum", [("kept = Mul(b, mu)", "kept = Mul(b, factor)")]),
    "a power of the momentum": ("momentum", [("kept = Mul(b, mu)", "both = Mul(b, b) kept = Mul(both, mu)")]),
    "half of nesterov": ("nesterov", [("ahead = Mul(buffer, mu)", "half = Mul(mu, factor) ahead = Mul(buffer, half)")]),
    "nesterov of another momentum": (
        "nesterov",
        [("ahead = Mul(buffer, mu)", "near = Constant<value_float = 0.9001>() ahead = Mul(buffer, near)")],
    ),
    "nesterov of another gradient": ("nesterov", [("d = Add(g, ahead)", "d = Add(p, ahead)")]),
    "a shrunk parameter": ("momentum", [("moved = Sub(p, way)", "less = Mul(p, rate) moved = Sub(less, way)")]),
    "decay by itself": (
        "momentum",
        [("moved = Sub(p, way)", "near = Constant<value_float = 0.999>() less = Mul(p, near) moved = Sub(less, way)")],
    ),
    "decay by the rate": (
        "momentum",
        [
            (
                "moved = Sub(p, way)",
                "loss = Constant<value_float = 0.1>() lost = Mul(rate, loss) gone = Mul(p, lost) less = Sub(p, gone) "
                "moved = Sub(less, way)",
            )
        ],
    ),
    "a divided gradient": ("gradient", [("way = Mul(d, rate)", "way = Div(rate, d)")]),
}


@pytest.mark.parametrize("name", ALMOST)
def test_updates_that_are_almost_sgds_keep_their_momentum(name: str) -> None:
    """A step along whatever it is may become the operator, but not the momentum."""
    direction, changed = ALMOST[name]
    model = Update(direction=direction, changed=tuple(changed)).model()
    result, _ = fused(model)
    for node in result.graph.node:
        if node.op_type == "ApplySgd":
            assert len(node.input) < 4 or not node.input[3]
    given_values = feeds()
    wanted, got = run(model, given_values), run(result, given_values)
    for output, value in wanted.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["steps up", "a rate for each element", "a shrunk parameter", "a divided gradient"])
def test_steps_that_are_not_along_a_gradient_stay(name: str) -> None:
    direction, changed = ALMOST[name]
    _, report = fused(Update(direction=direction, changed=tuple(changed)).model())
    assert "ApplySgd" not in operators(report)


@pytest.mark.parametrize("name", ["decay by itself", "decay by the rate"])
def test_explain_says_that_decay_is_apart_from_the_gradient(name: str) -> None:
    direction, changed = ALMOST[name]
    model = Update(direction=direction, changed=tuple(changed)).model()
    assert any("weight decay is part of the gradient" in region.reason for region in gradfuse.explain(model).regions)


def test_a_difference_that_is_no_result_stays() -> None:
    """Without a momentum, what is no result of the graph is a difference as any other."""
    text = "way = Mul(x, rate) y = Sub(w, way) z = MatMul(y, x)"
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> f (float[4,4] w, float[4,4] x, float rate) => (float[4,4] z) '
        f"{{ {text} }}"
    )
    assert not fused(model)[1].fusions


STEPS_OF_SGD = {
    "plain": {},
    "decay": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


def classifier() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> f (float[8,4] x) => (float[8,3] y) <float[4,3] w, float[3] c> '
        "{ z = MatMul(x, w) y = Add(z, c) }"
    )
    numbers = np.random.default_rng(0)
    for name, shape in (("w", (4, 3)), ("c", (3,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers.random(shape, np.float32), name))
    return model


@pytest.mark.parametrize("options", STEPS_OF_SGD.values(), ids=STEPS_OF_SGD)
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_steps_that_were_built_without_fusing(options: dict[str, Any], max_grad_norm: float | None) -> None:
    step = gradfuse.build_training_step(
        classifier(),
        "cross_entropy",
        optimizer=optimizers.SGD(lr=0.1, **options),
        max_grad_norm=max_grad_norm,
        fuse=False,
    )
    _, report = fused(step.model)
    assert operators(report).count("ApplySgd") == 2, report


@pytest.mark.parametrize("options", STEPS_OF_SGD.values(), ids=STEPS_OF_SGD)
def test_a_step_that_torch_exported(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, **options)
    x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
    step = gradfuse.export_training_step(
        module, torch.nn.functional.cross_entropy, (x, y), optimizer, fuse=False, evaluation=False
    )
    _, report = fused(step.model)
    assert operators(report).count("ApplySgd") == 4, report


def test_a_gradient_that_is_computed_twice() -> None:
    """The momentum and Nesterov's step read a node each that computes it of the parameter."""
    twice = (("d = Add(g, ahead)", "again = Mul(p, decay) once_more = Add(scaled, again) d = Add(once_more, ahead)"),)
    update = Update(direction="nesterov", weight_decay=0.1, changed=twice)
    model, report = fused(update.model())
    assert operators(report) == ["ApplySgd"], report
    given_values = feeds()
    exact, native = (of_torch(update, given_values, dtype) for dtype in (torch.float64, torch.float32))
    results = run(model, given_values)
    for name, wanted in exact.items():
        assert_gradients_close(results[name], native[name], wanted, np.float32)


def test_a_gradient_of_many_terms() -> None:
    """It is nearly as long as what is read of an update, and its momentum is found all the same."""
    count = 90
    halves = " ".join(f"s{k + 1} = Add(s{k}, h{k})" for k in range(count))
    terms = "s0 = Identity(gradient) " + " ".join(f"h{k} = Tanh(gradient)" for k in range(count))
    long = ((SCALES[""], f"{terms} {halves} scaled = Identity(s{count})"),)
    model, report = fused(Update(changed=long).model())
    assert operators(report) == ["ApplySgd"], report
    given_values = feeds()
    gradient = given_values["gradient"].astype(np.float64)
    whole = given_values | {"gradient": (gradient + count * np.tanh(gradient)).astype(np.float32)}
    exact, native = (of_torch(Update(), whole, dtype) for dtype in (torch.float64, torch.float32))
    results = run(model, given_values)
    for name, wanted in exact.items():
        # The sum of the terms is rounded as often.
        assert_gradients_close(results[name], native[name], wanted, np.float32, terms=count)
