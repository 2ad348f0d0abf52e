"""Updates of Adam and AdamW, however they are written, become ApplyAdamW; updates that are almost theirs stay."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from producers import run

import gradfuse
from gradfuse import fuse
from gradfuse.passes.report import Report
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

Array = npt.NDArray[Any]
SHAPE = (3, 5)
STATES = ("exp_avg", "exp_avg_sq")

MEANS = {
    "shares": "old_mean = Mul(kept1, m) new_mean = Mul(g, rest1) mean = Add(new_mean, old_mean)",
    "lerp": "change = Sub(g, m) part = Mul(rest1, change) mean = Add(m, part)",
    "lerp from the gradient": "change = Sub(g, m) part = Mul(change, kept1) mean = Sub(g, part)",
    "both lerps": "change = Sub(g, m) part = Mul(rest1, change) from_mean = Add(m, part) other = Mul(change, kept1) "
    "from_g = Sub(g, other) first = Constant<value = bool {1}>() mean = Where(first, from_mean, from_g)",
}
SQUARES = {
    "addcmul": "old_square = Mul(v, kept2) share = Mul(g, rest2) new_square = Mul(share, g) "
    "square = Add(old_square, new_square)",
    "of a square": "both = Mul(g, g) new_square = Mul(rest2, both) old_square = Mul(kept2, v) "
    "square = Sum(new_square, old_square)",
    "of a power": "two = Constant<value_float = 2.0>() both = Pow(g, two) old_square = Mul(kept2, v) "
    "new_square = Mul(both, rest2) square = Add(new_square, old_square)",
    # As Keras has it: an infinity becomes NaN.
    "by a difference": "both = Mul(g, g) change2 = Sub(both, v) part2 = Mul(change2, rest2) square = Add(v, part2)",
}
STEPS = {
    "corrected moments": "high = Div(mean, rest1_power) low = Div(square, rest2_power) root = Sqrt(low) "
    "denominator = Add(root, eps) way = Div(high, denominator) step_way = Mul(way, rate) moved = Sub(start, step_way)",
    "corrected step": "size = Div(rate, rest1_power) deviation = Sqrt(rest2_power) root = Sqrt(square) "
    "low = Div(root, deviation) denominator = Add(low, eps) long = Mul(mean, size) way = Div(long, denominator) "
    "moved = Sub(start, way)",
    "capturable": "inverse = Reciprocal(rest1_power) size = Mul(inverse, rate) negative = Neg(size) "
    "deviation = Sqrt(rest2_power) root = Sqrt(square) under = Mul(deviation, negative) low = Div(root, under) "
    "back = Reciprocal(negative) small = Mul(back, eps) denominator = Add(low, small) way = Div(mean, denominator) "
    "moved = Add(start, way)",
    "scaled epsilon": "root = Sqrt(square) deviation = Sqrt(rest2_power) small = Mul(eps, deviation) "
    "denominator = Add(root, small) ratio = Div(deviation, rest1_power) size = Mul(rate, ratio) "
    "way = Div(mean, denominator) long = Mul(size, way) moved = Sub(start, long)",
}
DECAYS = {
    "": "start = Identity(p)",
    "factor": "lost = Mul(rate, decay) left = Sub(one, lost) start = Mul(left, p)",
    "difference": "lost = Mul(rate, decay) decayed = Mul(p, lost) start = Sub(p, decayed)",
    "gradient": "start = Identity(p)",
}
SCALES = {
    "": "scaled = Identity(gradient)",
    "factor": "scaled = Mul(gradient, factor)",
    "divisor": "scaled = Div(gradient, factor)",
    "two": "clipped = Mul(factor, gradient) scaled = Mul(clipped, second)",
    "maximize": "clipped = Mul(gradient, factor) scaled = Neg(clipped)",
}


@dataclasses.dataclass(frozen=True)
class Update:
    """One way to write the update, and its options."""

    mean: str = "lerp"
    square: str = "addcmul"
    step: str = "corrected step"
    decay: str = "factor"
    scale: str = ""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    changed: tuple[tuple[str, str], ...] = ()
    """Replacements in the text, which make it another update."""

    def text(self) -> str:
        def constant(name: str, number: float) -> str:
            return f"{name} = Constant<value = float {{{number!r}}}>()"

        penalty = "penalty = Mul(p, decay) g = Add(scaled, penalty)"
        nodes = [
            constant("one", 1.0),
            constant("kept1", self.beta1),
            constant("rest1", 1 - self.beta1),
            constant("kept2", self.beta2),
            constant("rest2", 1 - self.beta2),
            constant("eps", self.eps),
            constant("decay", self.weight_decay),
            "one_more = Constant<value = int64 {1}>() counted = Add(step, one_more) count = Cast<to = 11>(counted)",
            f"beta1 = Constant<value = double {{{self.beta1!r}}}>()",
            f"beta2 = Constant<value = double {{{self.beta2!r}}}>()",
            "unit = Constant<value = double {1.0}>() power1 = Pow(beta1, count) power2 = Pow(beta2, count)",
            "wide1 = Sub(unit, power1) wide2 = Sub(unit, power2)",
            "rest1_power = Cast<to = 1>(wide1) rest2_power = Cast<to = 1>(wide2)",
            SCALES[self.scale],
            penalty if self.decay == "gradient" else "g = Identity(scaled)",
            MEANS[self.mean],
            SQUARES[self.square],
            DECAYS[self.decay],
            STEPS[self.step],
            "step_updated = Identity(counted)",
        ]
        text = "\n".join(nodes)
        for old, new in self.changed:
            assert old in text
            text = text.replace(old, new)
        return text

    def model(self) -> onnx.ModelProto:
        tensor = f"float[{','.join(map(str, SHAPE))}]"
        given = [f"{tensor} {name}" for name in ("p", "gradient", "m", "v")]
        given += ["float rate", "int64 step", "float factor", "float second"]
        return onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : 18]> update ({", ".join(given)}) => '
            f"({tensor} moved, {tensor} mean, {tensor} square, int64 step_updated) {{ {self.text()} }}"
        )


def feeds(step: int = 3, seed: int = 0) -> dict[str, Array]:
    numbers = np.random.default_rng(seed)
    tensors = {name: numbers.standard_normal(SHAPE).astype(np.float32) for name in ("p", "gradient", "m", "v")}
    tensors["v"] = np.abs(tensors["v"])
    singles = {"rate": 0.01, "factor": 0.7, "second": 1.3}
    return tensors | {k: np.asarray(x, np.float32) for k, x in singles.items()} | {"step": np.asarray(step, np.int64)}


def of_torch(update: Update, given: Mapping[str, Array], dtype: torch.dtype) -> dict[str, Array]:
    """The update by torch.optim."""
    tensors = {name: torch.from_numpy(given[name].copy()).to(dtype) for name in ("p", "gradient", "m", "v")}
    factor, second = (float(given[name]) for name in ("factor", "second"))
    scale = {"": 1.0, "factor": factor, "divisor": 1 / factor, "two": factor * second, "maximize": -factor}
    parameter = torch.nn.Parameter(tensors["p"])
    parameter.grad = tensors["gradient"] * scale[update.scale]
    kind = torch.optim.Adam if update.decay == "gradient" else torch.optim.AdamW
    optimizer = kind(
        [parameter],
        lr=float(given["rate"]),
        betas=(update.beta1, update.beta2),
        eps=update.eps,
        weight_decay=update.weight_decay if update.decay else 0.0,
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(float(given["step"])),
        "exp_avg": tensors["m"],
        "exp_avg_sq": tensors["v"],
    }
    optimizer.step()
    state = optimizer.state[parameter]
    results = {"moved": parameter.detach(), "mean": state["exp_avg"], "square": state["exp_avg_sq"]}
    return {name: value.numpy() for name, value in results.items()}


def fused(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Report]:
    result = fuse(model, policy="all", check=0)
    onnx.checker.check_model(result.model, full_check=True)
    return result.model, result.report


def operators(report: Report) -> list[str]:
    return [fusion.op for fusion in report.fusions]


def require_update(update: Update) -> None:
    """It becomes one node, which gives what torch gives."""
    model, report = fused(update.model())
    assert operators(report) == ["ApplyAdamW"], report
    (node,) = (node for node in model.graph.node if node.domain == "aclnn")
    for step, seed in ((0, 0), (1, 1), (999, 2)):
        given = feeds(step, seed)
        results, exact, native = (
            run(model, given),
            of_torch(update, given, torch.float64),
            of_torch(update, given, torch.float32),
        )
        assert results["step_updated"] == step + 1
        for name, wanted in exact.items():
            assert_gradients_close(results[name], native[name], wanted, np.float32)
    has_decay = update.decay != ""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["weight_decay"] == np.float32(update.weight_decay if has_decay else 0)
    assert len(node.input) == (7 if update.scale else 6)


@pytest.mark.parametrize(("step", "mean"), zip(STEPS, MEANS, strict=True))
def test_ways_to_write_the_step(step: str, mean: str) -> None:
    require_update(Update(step=step, mean=mean))


@pytest.mark.parametrize("step", [step for step in STEPS if step != "capturable"])
def test_the_rate_may_be_a_sum_that_the_graph_computes(step: str) -> None:
    """As a warm-up does: here two halves of the rate that is given."""
    parts = "half = Mul(given, two_parts) less = Sub(half, given) tall = Abs(less) rate = Add(half, tall)"
    constant = "two_parts = Constant<value = float {0.5}>()"
    update = Update(step=step, changed=(("one = Constant", f"{constant} {parts} one = Constant"),))
    model = update.model()
    model.graph.input[4].name = "given"
    model, report = fused(model)
    assert operators(report) == ["ApplyAdamW"], report
    values = feeds()
    exact, native = (of_torch(update, values, dtype) for dtype in (torch.float64, torch.float32))
    results = run(model, {"given" if name == "rate" else name: value for name, value in values.items()})
    for name, wanted in exact.items():
        assert_gradients_close(results[name], native[name], wanted, np.float32)


@settings(max_examples=8)
@given(
    st.builds(
        Update,
        mean=st.sampled_from(list(MEANS)),
        square=st.sampled_from(list(SQUARES)),
        step=st.sampled_from(list(STEPS)),
        decay=st.sampled_from(list(DECAYS)),
        scale=st.sampled_from(list(SCALES)),
        beta1=st.sampled_from([0.9, 0.5, 0.123, 0.95]),
        beta2=st.sampled_from([0.999, 0.95, 0.9, 0.9999]),
        eps=st.sampled_from([1e-8, 1e-3, 1e-6]),
        weight_decay=st.sampled_from([0.1, 0.01, 1.5]),
    )
)
def test_any_options(update: Update) -> None:
    require_update(update)


def test_a_mean_that_is_multiplied_first() -> None:
    """Half of the average has other weights than an average."""
    half = "half = Constant<value_float = 0.5>() less = Mul(mean, half)"
    changed = (
        ("high = Div(mean, rest1_power)", f"{half} high = Div(less, rest1_power)"),
        ("step_way = Mul(way, rate)", "twice = Add(rate, rate) step_way = Mul(way, twice)"),
    )
    require_update(Update(step="corrected moments", decay="gradient", changed=changed))


ALMOST = {
    "amsgrad": [("root = Sqrt(square)", "most = Max(square, v) root = Sqrt(most)")],
    "the old second moment": [("root = Sqrt(square)", "root = Sqrt(v)")],
    "epsilon inside the root": [
        ("root = Sqrt(square)", "inside = Add(square, eps) root = Sqrt(inside)"),
        ("Add(low, eps)", "Identity(low)"),
    ],
    "epsilon as a maximum": [("Add(low, eps)", "Max(low, eps)")],
    "no correction of the mean": [("Div(rate, rest1_power)", "Identity(rate)")],
    "corrections changed about": [
        ("Div(rate, rest1_power)", "Div(rate, rest2_power)"),
        ("Sqrt(rest2_power)", "Sqrt(rest1_power)"),
    ],
    "a correction without its root": [("Sqrt(rest2_power)", "Identity(rest2_power)")],
    "corrections of another beta": [("double {0.9}", "double {0.95}")],
    "corrections of almost the same beta": [("double {0.999}", "double {0.9990001}")],
    "another share of the gradient": [(f"float {{{1 - 0.9!r}}}", "float {0.2}")],
    "another share of the square": [(f"float {{{1 - 0.999!r}}}", "float {0.001002}")],
    "more digits than an attribute has": [("0.999", "0.99912345678"), (f"{1 - 0.999!r}", f"{1 - 0.99912345678!r}")],
    "the steps done before": [("counted = Add(step, one_more)", "counted = Identity(step)")],
    "two steps more": [("one_more = Constant<value = int64 {1}>", "one_more = Constant<value = int64 {2}>")],
    "two counts": [("power2 = Pow(beta2, count)", "older = Cast<to = 11>(step) power2 = Pow(beta2, older)")],
    "another moving average": [("long = Mul(mean, size)", "long = Mul(m, size)")],
    "nesterov": [
        (
            "long = Mul(mean, size)",
            "ahead = Mul(mean, kept1) new = Mul(g, rest1) both = Add(ahead, new) long = Mul(both, size)",
        )
    ],
    "a gradient in place of its mean": [("long = Mul(mean, size)", "long = Mul(g, size)")],
    "another gradient in the square": [
        ("share = Mul(g, rest2) new_square = Mul(share, g)", "share = Mul(g, rest2) new_square = Mul(share, p)")
    ],
    "squares of something else": [
        ("share = Mul(g, rest2) new_square = Mul(share, g)", "share = Mul(p, rest2) new_square = Mul(share, p)")
    ],
    "decay without the learning rate": [("lost = Mul(rate, decay)", "lost = Identity(decay)")],
    "decay by another rate": [("lost = Mul(rate, decay)", "lost = Mul(factor, decay)")],
    "growth in place of decay": [("left = Sub(one, lost)", "left = Add(one, lost)")],
    "decay of another tensor": [("start = Mul(left, p)", "gone = Mul(m, lost) start = Sub(p, gone)")],
    "steps up": [("moved = Sub(start, way)", "moved = Add(start, way)")],
    "a mean that goes back": [("mean = Add(m, part)", "mean = Sub(m, part)")],
    "a root of a root": [("root = Sqrt(square)", "inner = Sqrt(square) root = Sqrt(inner)")],
}


OWN_RATE = {
    "no bias corrections": "size = Identity(rate)",
    "a constant rate and no bias corrections": "size = Constant<value_float = 0.01>()",
    "no correction of the squares": "size = Div(rate, rest1_power)",
    # As Keras has it.
    "bias corrections of the rate": "deviation = Sqrt(rest2_power) longer = Mul(rate, deviation) "
    "size = Div(longer, rest1_power)",
    # As TensorFlow has it, whose states are the powers.
    "powers that are states": "power1_left = Sub(one, factor) power2_left = Sub(one, second) "
    "deviation = Sqrt(power2_left) longer = Mul(rate, deviation) size = Div(longer, power1_left)",
}


def _with_own_rate(name: str, given: Mapping[str, Array], dtype: Any, decay: float) -> dict[str, Array]:
    """The update in NumPy."""
    p, g, m, v = (given[one].astype(dtype) for one in ("p", "gradient", "m", "v"))
    mean, square = m + (g - m) * dtype(1 - 0.9), v * dtype(0.999) + g * g * dtype(1 - 0.999)
    lost = {
        "no bias corrections": (0.0, 0.0),
        "no correction of the squares": (0.9 ** (1 + int(given["step"])), 0.0),
        "bias corrections of the rate": (0.9 ** (1 + int(given["step"])), 0.999 ** (1 + int(given["step"]))),
        "powers that are states": (float(given["factor"]), float(given["second"])),
    }
    of_mean, of_square = lost.get(name, (0.0, 0.0))
    rate = dtype(given["rate"] * np.sqrt(1 - of_square) / (1 - of_mean))
    start = p * dtype(1 - given["rate"] * decay)
    return {"moved": start - rate * mean / (np.sqrt(square) + dtype(1e-8)), "mean": mean, "square": square}


def test_an_infinite_average_becomes_nan_where_the_graph_makes_it_so() -> None:
    model = Update(square="by a difference").model()
    result, report = fused(model)
    assert operators(report) == ["ApplyAdamW"], report
    given = feeds()
    given["v"].flat[2] = np.inf
    wanted, got = run(model, given), run(result, given)
    for name in ("moved", "square"):
        assert np.isnan(wanted[name].flat[2]) and np.isfinite(wanted[name]).sum() == given["v"].size - 1
        np.testing.assert_array_equal(np.isnan(got[name]), np.isnan(wanted[name]))


def test_powers_by_the_logarithms_of_the_betas() -> None:
    changes = tuple(
        (
            f"power{k} = Pow(beta{k}, count)",
            f"log{k} = Constant<value = double {{{float(np.log(beta))!r}}}>() times{k} = Mul(count, log{k}) "
            f"power{k} = Exp(times{k})",
        )
        for k, beta in ((1, 0.9), (2, 0.999))
    )
    result, report = fused(Update(changed=changes).model())
    assert operators(report) == ["ApplyAdamW"], report
    plain = fused(Update().model())[0]
    np.testing.assert_array_equal(run(result, feeds())["moved"], run(plain, feeds())["moved"])


@pytest.mark.parametrize("name", OWN_RATE)
@pytest.mark.parametrize("decay", ["", "difference"])
def test_a_rate_with_its_own_corrections_and_epsilon_beside_the_plain_root(name: str, decay: str) -> None:
    step = (
        f"{OWN_RATE[name]} root = Sqrt(square) denominator = Add(root, eps) way = Div(mean, denominator) "
        "long = Mul(way, size) moved = Sub(start, long)"
    )
    result, report = fused(Update(decay=decay, changed=((STEPS["corrected step"], step),)).model())
    assert operators(report) == ["ApplyAdamW"], report
    given = feeds() | {"second": np.asarray(0.9, np.float32)}
    got = run(result, given)
    exact, native = (_with_own_rate(name, given, dtype, 0.1 if decay else 0.0) for dtype in (np.float64, np.float32))
    for output, value in exact.items():
        assert_gradients_close(got[output], native[output], value, np.float32, terms=4)


@pytest.mark.parametrize("name", ALMOST)
def test_updates_that_are_almost_adams_stay(name: str) -> None:
    model = Update(changed=tuple(ALMOST[name])).model()
    result, report = fused(model)
    assert "ApplyAdamW" not in operators(report)
    given = feeds()
    wanted, got = run(model, given), run(result, given)
    for output, value in wanted.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("amsgrad", "amsgrad"),
        ("no correction of the mean", "bias corrections are those of 0.999"),
        ("two steps more", "are for 2 more than the steps that are counted"),
        ("corrections of another beta", "are those of 0.95 and 0.999, its betas 0.9 and 0.999"),
        ("decay without the learning rate", "weight decay is not in proportion to the learning rate"),
    ],
)
def test_the_report_says_why_an_update_stays(name: str, reason: str) -> None:
    _, report = fused(Update(changed=tuple(ALMOST[name])).model())
    assert any(miss.rule == "ApplyAdamW" and reason in miss.reason and not miss.bug for miss in report.near_misses)
    text = str(gradfuse.explain(Update(changed=tuple(ALMOST[name])).model()))
    assert "ApplyAdamW at moved: not matched" in text


@pytest.mark.parametrize("decay", ["moved = Mul(left, near)", "gone = Mul(near, lost) moved = Sub(near, gone)"])
def test_decay_after_the_update_stays_outside(decay: str) -> None:
    """It is that of the moved parameter, and not of the operator."""
    changed = (
        ("start = Mul(left, p)", "start = Identity(p)"),
        ("moved = Sub(start, way)", f"near = Sub(start, way) {decay}"),
    )
    model = Update(changed=changed).model()
    result, report = fused(model)
    assert operators(report) == ["ApplyAdamW"]
    (node,) = (node for node in result.graph.node if node.domain == "aclnn")
    assert {a.name: a.f for a in node.attribute}["weight_decay"] == 0
    given = feeds()
    wanted, got = run(model, given), run(result, given)
    for output, value in wanted.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-6, atol=1e-7)


def test_a_state_that_decides_the_learning_rate_cannot_come_out_with_the_parameter() -> None:
    """The rate needs the new mean, so one node for both would read what it computes."""
    change = [
        ("size = Div(rate, ", "norm = ReduceL2<keepdims = 0>(mean) own_rate = Div(rate, norm) size = Div(own_rate, "),
        ("lost = Mul(rate, decay)", "lost = Mul(rate, decay)"),
    ]
    model = Update(decay="", changed=tuple(change[:1])).model()
    result, report = fused(model)
    assert "ApplyAdamW" not in operators(report)
    given = feeds()
    wanted, got = run(model, given), run(result, given)
    for output, value in wanted.items():
        np.testing.assert_array_equal(got[output], value)


def test_readers_of_a_state_before_the_parameter_read_the_new_node() -> None:
    change = [
        ("start = Identity(p)", "norm = ReduceL2<keepdims = 0>(square) start = Identity(p)"),
        ("step_updated = Identity(counted)", "whole = Cast<to = 7>(norm) step_updated = Mul(whole, counted)"),
    ]
    model = Update(decay="", changed=tuple(change)).model()
    result, report = fused(model)
    assert operators(report) == ["ApplyAdamW"]
    given = feeds()
    wanted, got = run(model, given), run(result, given)
    for output, value in wanted.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-6)


def test_a_state_that_no_output_shows_is_left_out() -> None:
    model = Update().model()
    del model.graph.output[1:3]
    result, report = fused(model)
    assert operators(report) == ["ApplyAdamW"]
    given = feeds()
    np.testing.assert_allclose(run(result, given)["moved"], run(model, given)["moved"], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_types(dtype: Any) -> None:
    """The operator computes 16 bits in float32, and has no float64."""
    update = Update(decay="difference")
    model = update.model()
    text = onnx.printer.to_text(model)
    if dtype == np.float64:
        text = text.replace("float", "double").replace("double <", "float <").replace("to: int = 1>", "to: int = 11>")
        _, report = fused(onnx.parser.parse_model(text))
        assert not operators(report)
        assert any("float64" in miss.reason for miss in report.near_misses if miss.rule == "ApplyAdamW")
        return
    half = dtype_of_storage(model, onnx.TensorProto.FLOAT16)
    result, report = fused(half)
    assert operators(report) == ["ApplyAdamW"]
    given = {k: a.astype(dtype) if a.shape else a for k, a in feeds().items()}
    wide = {k: a.astype(np.float32) if a.shape else a for k, a in given.items()}
    exact = of_torch(update, wide, torch.float64)
    wanted, got = run(half, given), run(result, given)
    for name, value in exact.items():
        assert_gradients_close(got[name], wanted[name], value, dtype)


def dtype_of_storage(model: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """The update with tensors in another type, which is computed in float32."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    for value in (*graph.input[:4], *graph.output[:3]):
        value.type.tensor_type.elem_type = dtype
    given = [value.name for value in graph.input[:4]]
    results = [value.name for value in graph.output[:3]]
    renamed = {name: f"{name}_wide" for name in (*given, *results)}
    for node in graph.node:
        for names in (node.input, node.output):
            for k, name in enumerate(names):
                names[k] = renamed.get(name, name)
    nodes = [
        *(onnx.helper.make_node("Cast", [name], [renamed[name]], to=1) for name in given),
        *graph.node,
        *(onnx.helper.make_node("Cast", [renamed[name]], [name], to=dtype) for name in results),
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    return changed


def test_many_parameters_take_one_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of other shapes are run once, so that a large network is fused as fast as its graph is read."""
    from gradfuse.passes.proving import proof

    runs = []
    compare = proof.Proof._compare

    def counted(self: proof.Proof) -> None:
        runs.append(self)
        compare(self)

    monkeypatch.setattr(proof.Proof, "_compare", counted)
    monkeypatch.setattr(proof, "_PROVED", set())
    for shape in ((3, 5), (7,), (2, 3, 4)):
        text = onnx.printer.to_text(Update().model()).replace("3,5", ",".join(map(str, shape)))
        _, report = fused(onnx.parser.parse_model(text))
        assert operators(report) == ["ApplyAdamW"]
    assert len(runs) == 3  # one for each of the results


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("beta1", 0.90001),
        ("beta2", 0.99901),
        ("epsilon", 1e-7),
        ("weight_decay", 0.11),
        ("decoupled_weight_decay", 0),
    ],
)
def test_the_numbers_refute_a_wrong_attribute(monkeypatch: pytest.MonkeyPatch, attribute: str, value: float) -> None:
    from gradfuse.passes.matching import Builder

    whole = Builder.fused_whole
    monkeypatch.setattr(
        Builder, "fused_whole", lambda self, *given, **chosen: whole(self, *given, **(chosen | {attribute: value}))
    )
    _, report = fused(Update().model())
    assert not operators(report) or "ApplyAdamW" not in operators(report)
    assert any(miss.bug for miss in report.near_misses)


@pytest.mark.parametrize("inputs", [(0, 1), (2, 3), (2, 0), (1, 2)])
def test_the_numbers_refute_tensors_that_are_changed_about(
    monkeypatch: pytest.MonkeyPatch, inputs: tuple[int, int]
) -> None:
    from gradfuse.passes.matching import Builder

    whole = Builder.fused_whole

    def wrong(self: Builder, operator: str, values: list[Any], *given: Any, **chosen: Any) -> Any:
        a, b = inputs
        values[a], values[b] = values[b], values[a]
        return whole(self, operator, values, *given, **chosen)

    monkeypatch.setattr(Builder, "fused_whole", wrong)
    _, report = fused(Update().model())
    assert "ApplyAdamW" not in operators(report)


def test_what_torch_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.AdamW with `capturable`, traced by make_fx: its step is a float32 state."""
    given = feeds()
    tensors = [torch.from_numpy(given[name]) for name in ("p", "gradient", "m", "v")]
    module: Any = sys.modules["torch.optim.adam"]
    from torch.fx.experimental.proxy_tensor import make_fx

    def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: torch.Tensor) -> Any:
        new = [one.clone() for one in (p, m, v, step)]
        module.adam(
            *([new[0]], [g], [new[1]], [new[2]], [], [new[3]]),
            foreach=False,
            capturable=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=0.01,
            weight_decay=0.1,
            eps=1e-8,
            maximize=False,
            decoupled_weight_decay=True,
        )
        return tuple(new)

    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    traced = make_fx(update)(*tensors, torch.tensor(3.0))
    program = torch.onnx.export(traced.eval(), (*tensors, torch.tensor(3.0)), dynamo=True, verbose=False)
    assert program is not None
    model = program.model_proto
    result, report = fused(model)
    assert operators(report) == ["ApplyAdamW"]
    arrays = dict(
        zip(
            [value.name for value in model.graph.input],
            [*(t.numpy() for t in tensors), np.asarray(3, np.float32)],
            strict=True,
        )
    )
    exact = of_torch(Update(), given, torch.float64)
    wanted, got = run(model, arrays), run(result, arrays)
    for output, value in zip(list(wanted)[:3], exact.values(), strict=True):
        assert_gradients_close(got[output], wanted[output], value, np.float32)
    assert got[list(wanted)[3]] == 4


def test_a_graph_without_the_counters_output_stays() -> None:
    """A count in float32 is taken for whole only where each step makes it 1 larger."""
    text = (
        Update()
        .text()
        .replace("counted = Add(step, one_more)", "counted = Add(step, one)")
        .replace("step_updated = Identity(counted)", "step_updated = Identity(step)")
    )
    tensor = "float[3,5]"
    given = ", ".join([*(f"{tensor} {n}" for n in ("p", "gradient", "m", "v")), "float rate", "float step"])
    for result, fuses in (("step_updated", False), ("counted", True)):
        model = onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : 18]> update ({given}) => '
            f"({tensor} moved, float {result}) {{ {text} }}"
        )
        _, report = fused(model)
        assert ("ApplyAdamW" in operators(report)) == fuses


COUNTED = "counted = Add(step, one_more) count = Cast<to = 11>(counted)"


@pytest.mark.parametrize(
    "narrowed",
    [
        *(f"counted = Add(step, one_more) few = Cast<to = {t}>(counted)" for t in (2, 3, 4, 5, 9, 10, 16)),
        "slim = Cast<to = 2>(step) one_slim = Cast<to = 2>(one_more) few = Add(slim, one_slim) "
        "counted = Cast<to = 7>(few)",
        "counted = Add(step, one_more) round = Constant<value = int64 {200}>() few = Mod(counted, round)",
        "counted = Add(step, one_more) most = Constant<value = int64 {200}>() few = Min(counted, most)",
        "counted = Add(step, one_more) least = Constant<value = int64 {500}>() few = Max(counted, least)",
        "counted = Add(step, one_more) wide = Cast<to = 1>(counted) few = Cast<to = 16>(wide)",
    ],
)
def test_a_count_that_is_narrowed_wraps_or_stays_as_in_the_graph(narrowed: str) -> None:
    """Adam's corrections are of the number of steps that the graph counts, not of the one that it began with."""
    model = Update(changed=((COUNTED, f"{narrowed} count = Cast<to = 11>(few)"),)).model()
    result, report = fused(model)
    assert "ApplyAdamW" not in operators(report)
    for step in (126, 254, 255, 300, 3000):
        given = feeds(step)
        wanted, got = run(model, given), run(result, given)
        for output, value in wanted.items():
            np.testing.assert_allclose(got[output], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("most", "fuses"), [(2**31 - 1, True), (2**62, True), (200, False)])
def test_a_count_that_stops_where_powers_are_0_is_read(most: int, fuses: bool) -> None:
    """As optax keeps a count from being larger than an int32."""
    kept = (
        f"next = Add(step, one_more) most = Constant<value = int64 {{{most}}}>() below = Less(step, most) "
        "counted = Where(below, next, most) count = Cast<to = 11>(counted)"
    )
    update = Update(changed=((COUNTED, kept),))
    if fuses:
        require_update(update)
    else:
        assert "ApplyAdamW" not in operators(fused(update.model())[1])


PICKS = {
    "Gather": "size = Gather(row, place)",
    "Slice": "size = Slice(row, place, end)",
    "Split": "before, size, after = Split<num_outputs = 3>(row)",
}


@pytest.mark.parametrize("name", PICKS)
def test_step_sizes_in_a_row(name: str) -> None:
    """As torch's `foreach` has one for each parameter."""
    row = (
        "own_size = Div(rate, rest1_power) line = Constant<value_ints = [1]>() long_size = Reshape(own_size, line) "
        "other = Constant<value_floats = [0.5]>() row = Concat<axis = 0>(other, long_size, other) "
        f"place = Constant<value_ints = [1]>() end = Constant<value_ints = [2]>() {PICKS[name]}"
    )
    require_update(Update(changed=(("size = Div(rate, rest1_power)", row),)))


@pytest.mark.parametrize("to", [1, 6, 7, 11])
def test_a_count_in_a_type_that_holds_it_is_read(to: int) -> None:
    kept = f"counted = Add(step, one_more) kept = Cast<to = {to}>(counted) count = Cast<to = 11>(kept)"
    require_update(Update(changed=((COUNTED, kept),)))


def test_a_gradient_that_was_rounded_to_float16_stays_so() -> None:
    """There it is 0, and of a small gradient Adam makes a whole step."""
    rounded = "narrow = Cast<to = 10>(gradient) given = Cast<to = 1>(narrow) scaled = Identity(given)"
    model = Update(changed=((SCALES[""], rounded),)).model()
    result, _ = fused(model)
    given = feeds(step=0) | {"gradient": np.full(SHAPE, 1e-9, np.float32)}
    given |= {"m": np.zeros(SHAPE, np.float32), "v": np.zeros(SHAPE, np.float32)}
    wanted, got = run(model, given), run(result, given)
    for output, value in wanted.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", ["factor", "divisor", "maximize"])
def test_a_gradient_scaled_in_float16_is_scaled_there(scale: str) -> None:
    """In float16 a scale takes small gradients to 0 and large ones to infinity: not so the operator's."""
    text = SCALES[scale].replace("gradient", "narrow").replace("scaled = ", "narrow_scaled = ")
    text = text.replace("factor", "narrow_factor")
    whole = f"narrow = Cast<to = 10>(gradient) narrow_factor = Cast<to = 10>(factor) {text} "
    model = Update(scale=scale, changed=((SCALES[scale], whole + "scaled = Cast<to = 1>(narrow_scaled)"),)).model()
    result, _ = fused(model)
    given = feeds(step=0) | {"gradient": np.full(SHAPE, 2e-5, np.float32), "factor": np.asarray(1e-3, np.float32)}
    given |= {"m": np.zeros(SHAPE, np.float32), "v": np.zeros(SHAPE, np.float32)}
    wanted, got = run(model, given), run(result, given)
    for output, value in wanted.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-6, atol=1e-7)
