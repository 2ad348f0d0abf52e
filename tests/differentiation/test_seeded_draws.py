"""Dropout and other draws of forward models in ONNX: the same numbers as in steps exported from PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
import torch
from node_tests import run
from torch import nn

import gradfuse
from gradfuse import TrainingSession, build_training_step

pytestmark = pytest.mark.usefixtures("inference_in_process")

Array = npt.NDArray[Any]

TRAINS = "drops = Constant<value = bool {1}>()"
SHARE = "share = Constant<value = float {0.3}>()"


def network(module: nn.Sequential, draw: str, inputs: str = "float[N, 8] x", opset: int = 18) -> onnx.ModelProto:
    """Linear, ReLU, what draws, Linear, with the parameters of a module."""
    text = f"""
        <ir_version: 8, opset_import: ["": {opset}]> g ({inputs}) => (float[N, 3] y) {{
            h = Gemm<transB = 1>(x, first, first_bias)
            r = Relu(h)
            {draw}
            y = Gemm<transB = 1>(d, second, second_bias)
        }}
    """
    model = onnx.parser.parse_model(text)
    for name, parameter in zip(("first", "first_bias", "second", "second_bias"), module.parameters(), strict=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(parameter.detach().numpy(), name))
    return model


def two_layers(share: float = 0.3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Dropout(share), nn.Linear(400, 3))


def batch() -> tuple[Array, Array]:
    numbers = np.random.default_rng(0)
    return numbers.standard_normal((6, 8)).astype(np.float32), numbers.integers(0, 3, 6)


@pytest.mark.parametrize("opset", [17, 18, 20])
@pytest.mark.parametrize(
    "draw, inputs",
    [
        (f"{SHARE} {TRAINS} d = Dropout(r, share, drops)", "float[N, 8] x"),
        (f"{SHARE} {TRAINS} d, kept = Dropout<seed = 7>(r, share, drops)", "float[N, 8] x"),
        (f"{SHARE} d = Dropout(r, share, drops)", "float[N, 8] x, bool drops"),
    ],
)
@pytest.mark.sampled(every=3)
def test_dropout_is_that_of_exported_steps(draw: str, inputs: str, opset: int) -> None:
    module = two_layers()
    x, y = batch()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    exported = gradfuse.export_training_step(
        module, nn.CrossEntropyLoss(), (torch.from_numpy(x), torch.from_numpy(y)), optimizer, evaluation=False
    )
    model = network(module, draw, inputs, opset)
    step = build_training_step(model, "cross_entropy", optimizer=gradfuse.optimizers.SGD(lr=0.1))
    assert list(step.buffers) == ["dropout_seed"]
    arguments = ((x, np.array(True)), y) if "bool" in inputs else (x, y)
    wanted, found = TrainingSession(exported), TrainingSession(step)
    losses = [(wanted.step(x, y), found.step(*arguments)) for _ in range(5)]
    for one, other in losses:
        assert abs(one - other) <= 1e-5 * abs(one)
    assert len({loss for loss, _ in losses}) == 5


def test_a_step_is_checked_and_repeats_itself() -> None:
    model = network(two_layers(), f"{SHARE} {TRAINS} d = Dropout(r, share, drops)")
    x, y = batch()
    step = build_training_step(model, "cross_entropy", check={"x": x, "target": y})
    feeds = {**step.parameters, **step.buffers, "x": x, "target": y}
    first, again = (run(step.model, feeds, by_onnx=False) for _ in range(2))
    later = run(step.model, feeds | {"dropout_seed": first["dropout_seed.updated"]}, by_onnx=False)
    assert first["loss"] == again["loss"] != later["loss"]


def test_dropout_that_is_off_at_run_time() -> None:
    module = two_layers()
    x, y = batch()
    model = network(module, f"{SHARE} d = Dropout(r, share, drops)", "float[N, 8] x, bool drops")
    step = build_training_step(model, "cross_entropy")
    found = run(
        step.model, {**step.parameters, **step.buffers, "x": x, "drops": np.array(False), "target": y}, by_onnx=False
    )
    wanted = nn.functional.cross_entropy(module.eval()(torch.from_numpy(x)), torch.from_numpy(y))
    np.testing.assert_allclose(found["loss"], wanted.item(), rtol=1e-6)


def test_evaluation_drops_nothing() -> None:
    module = two_layers()
    x, _ = batch()
    step = build_training_step(
        network(module, f"{SHARE} {TRAINS} d = Dropout(r, share, drops)"),
        "cross_entropy",
        optimizer=gradfuse.optimizers.SGD(lr=0.1),
    )
    found = TrainingSession(step).evaluate(x)
    np.testing.assert_allclose(found, module.eval()(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-6)


def test_dropout_without_training_mode_draws_nothing() -> None:
    step = build_training_step(network(two_layers(), f"{SHARE} d = Dropout(r, share)"), "cross_entropy")
    assert not step.buffers


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_nothing(share: float) -> None:
    x, y = batch()
    draw = f"share = Constant<value = float {{{share}}}>() {TRAINS} d = Dropout(r, share, drops)"
    module = two_layers(share)
    step = build_training_step(network(module, draw), "cross_entropy")
    found = run(step.model, {**step.parameters, **step.buffers, "x": x, "target": y}, by_onnx=False)
    wanted = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
    np.testing.assert_allclose(found["loss"], wanted.item(), rtol=1e-6)


def test_a_share_that_is_an_input() -> None:
    x, y = batch()
    model = network(two_layers(), f"{TRAINS} d, kept = Dropout(r, share, drops)", "float[N, 8] x, float share")
    step = build_training_step(model, "cross_entropy")
    feeds = {**step.parameters, **step.buffers, "x": x, "target": y}
    fixed = build_training_step(
        network(two_layers(), f"{SHARE} {TRAINS} d = Dropout(r, share, drops)"), "cross_entropy"
    )
    wanted = run(fixed.model, feeds, by_onnx=False)
    found = run(step.model, feeds | {"share": np.array(0.3, np.float32)}, by_onnx=False)
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)


MOMENTS = {
    "noise = RandomNormalLike<mean = 2.0, scale = 3.0>(r)": (2.0, 3.0),
    "noise = RandomUniformLike<low = -1.0, high = 3.0>(r)": (1.0, 4 / 12**0.5),
    "noise = RandomNormal<shape = [6, 400], dtype = 1>()": (0.0, 1.0),
    "noise = RandomUniform<shape = [6, 400]>()": (0.5, 12**-0.5),
    "half = Constant<value = float {0.25}>() zeros = Mul(r, half) ones = Sub(zeros, zeros) p = Add(ones, half) "
    "noise = Bernoulli(p)": (0.25, (0.25 * 0.75) ** 0.5),
}


@pytest.mark.parametrize("draw", MOMENTS)
def test_moments_of_draws(draw: str) -> None:
    """2,400 numbers have the mean and deviation of their distribution, and others in the next step."""
    model = network(two_layers(), f"{draw} d = Mul(r, noise)")
    x, y = batch()
    step = build_training_step(model, "cross_entropy", check={"x": x, "target": y})
    assert not {"Bernoulli", "RandomNormal", "RandomUniform"} & {node.op_type for node in step.model.graph.node}
    observed = onnx.ModelProto.FromString(step.model.SerializeToString())
    observed.graph.output.append(onnx.helper.make_tensor_value_info("noise", onnx.TensorProto.FLOAT, None))
    feeds = {**step.parameters, **step.buffers, "x": x, "target": y}
    numbers = [run(observed, feeds | {"dropout_seed": np.array(seed)}, by_onnx=False)["noise"] for seed in range(2)]
    mean, deviation = MOMENTS[draw]
    for found in numbers:
        assert found.size == 2400
        assert abs(found.mean() - mean) < 5 * deviation / 2400**0.5
        assert abs(found.std() - deviation) < 0.1 * deviation
    assert (numbers[0] != numbers[1]).mean() > 0.3


def test_the_seed_has_another_name_where_an_input_has_its_own() -> None:
    model = network(two_layers(), f"{SHARE} {TRAINS} d = Dropout(r, share, drops)", "float[N, 8] x, int64 dropout_seed")
    step = build_training_step(model, "cross_entropy")
    assert "dropout_seed" in step.input_names and step.own_names == {"dropout_seed": "dropout_seed_"}
    assert "dropout_seed_" in step.buffers
