"""Updates in place give the bits that two sets of tensors give, and happen only where all readers have run before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.parser
import onnxruntime
import pytest
from command_runs import Run, runner

import gradfuse
from gradfuse import TrainingSession, TrainingStep, optimizers
from gradfuse.models.arrays import Arrays

STEPS = 3
SIDE = 6

FORWARD = {
    "two layers": ("hidden = MatMul(x, a)  active = Relu(hidden)  wide = MatMul(active, b)  y = Add(wide, c)", "abc"),
    # The gradient of x goes on past the reader of a, which onnxruntime lets read a itself.
    "a transposed weight": (
        "first = MatMul(x, b)  flipped = Transpose<perm = [1, 0]>(a)  hidden = MatMul(first, flipped)  "
        "active = Tanh(hidden)  y = MatMul(active, a)",
        "ab",
    ),
    "normalised": (
        "hidden = MatMul(x, a)  normal = LayerNormalization<axis = -1>(hidden, c)  y = MatMul(normal, b)",
        "abc",
    ),
}
"""Nodes from x to y, and the parameters: a and b of shape (6, 6), c of (6)."""


def trained(forward: str, parameters: str, loss: str = "mse", **options: Any) -> TrainingStep:
    shapes = {"a": (SIDE, SIDE), "b": (SIDE, SIDE), "c": (SIDE,)}
    numbers = np.random.default_rng(0)
    values = ", ".join(f"float[{','.join(map(str, shapes[name]))}] {name}" for name in parameters)
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> forward (float[4, {SIDE}] x) => (float[4, {SIDE}] y) '
        f"<{values}> {{ {forward} }}"
    )
    for name in parameters:
        array = numbers.standard_normal(shapes[name]).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return gradfuse.build_training_step(model, loss, optimizer=optimizers.AdamW(lr=0.05), **options)


def batches() -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    numbers = np.random.default_rng(1)
    return [tuple(numbers.standard_normal((2, 4, SIDE)).astype(np.float32)) for _ in range(STEPS)]


def by_two_sets(step: TrainingStep) -> tuple[list[float], Arrays]:
    """Losses, parameters and state of steps that get arrays and give new ones."""
    options = onnxruntime.SessionOptions()
    gradfuse.register(options)
    session = onnxruntime.InferenceSession(step.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    values: Arrays = step.parameters | step.buffers | step.optimizer_state | step.hyperparameters
    losses = []
    for x, y in batches():
        batch = {step.input_names[0]: x, **({step.target_names[0]: y} if step.target_names else {})}
        results = dict(zip(names, session.run(names, values | batch), strict=True))
        losses.append(float(results["loss"]))
        values = values | {name.removesuffix(".updated"): array for name, array in results.items() if name != "loss"}
    return losses, values


def places(session: TrainingSession) -> Mapping[str, int]:
    return {name: value.data_ptr() for name, value in session.ort_values.items()}


def run(step: TrainingStep) -> set[str]:
    """Compare a session with steps on two sets; return what was updated in place."""
    session = TrainingSession(step)
    losses, at = [], [places(session)]
    for x, y in batches():
        losses.append(session.step(x, y if step.target_names else ()))
        at.append(places(session))
    expected_losses, expected = by_two_sets(step)
    assert losses == expected_losses
    for name, value in session.ort_values.items():
        np.testing.assert_array_equal(value.numpy(), expected[name], strict=True)
    changed = [output.name.removesuffix(".updated") for output in step.model.graph.output if output.name != "loss"]
    return {name for name in changed if at[0][name] == at[1][name]}


@pytest.fixture
def run_command(capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(capfd)


def with_state(*parameters: str) -> set[str]:
    return {f"{name}{state}" for name in parameters for state in ("", ".exp_avg", ".exp_avg_sq")}


@pytest.mark.parametrize("clipped", [None, 0.1])
@pytest.mark.parametrize("name", FORWARD)
def test_matrices_are_updated_in_place(name: str, clipped: float | None) -> None:
    step = trained(*FORWARD[name], max_grad_norm=clipped)
    assert run(step) >= with_state("a", "b")


@pytest.mark.parametrize(
    "views",
    ["left = Identity(a)  right = Identity(b)", "left = Reshape(a, line)  right = Reshape(b, line)"],
)
def test_gradients_that_may_be_another_parameter_keep_it_from_being_overwritten(views: str) -> None:
    """The gradient of a is b itself, and that of b is a: after the first update the second would read a new a."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> forward (float[4, {SIDE}] x) => (float y) '
        f"<float[{SIDE}, {SIDE}] a, float[{SIDE}, {SIDE}] b, int64[1] line = {{-1}}> {{ {views} "
        "products = Mul(left, right)  total = ReduceSum<keepdims = 0>(products)  far = ReduceSum<keepdims = 0>(x)  "
        "y = Add(total, far) }"
    )
    numbers = np.random.default_rng(0)
    for name in "ab":
        array = numbers.standard_normal((SIDE, SIDE)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    step = gradfuse.build_training_step(model, None, optimizer=optimizers.AdamW(lr=0.05))
    assert not run(step) & {"a", "b"}


def test_a_step_that_was_saved_as_nodes_is_updated_in_place_once_it_is_fused(run_command: Run, tmp_path: Path) -> None:
    """`gradfuse fuse` finds the updates, and training goes on as with a step that was exported fused."""
    plain = trained(*FORWARD["two layers"], max_grad_norm=0.1, fuse=False)
    source, target = tmp_path / "step.onnx", tmp_path / "fused.onnx"
    plain.save(source)
    code, output, errors = run_command("fuse", source, target)
    assert code == 0, errors
    assert output.count("ApplyAdamW") >= 3
    fused = TrainingStep.load(target)
    assert run(fused) >= with_state("a", "b")
    losses, values = by_two_sets(fused)
    assert losses == by_two_sets(trained(*FORWARD["two layers"], max_grad_norm=0.1))[0]
    expected_losses, expected = by_two_sets(plain)
    eps = float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(losses, expected_losses, rtol=8 * eps)
    assert expected["step"] == values["step"] == STEPS


def test_options_without_the_library_have_two_sets() -> None:
    step = trained(*FORWARD["two layers"])
    session = TrainingSession(step, session_options=onnxruntime.SessionOptions())
    before = places(session)
    x, y = batches()[0]
    session.step(x, y)
    assert all(before[name] != places(session)[name] for name in with_state("a", "b", "c"))


def test_what_a_penalty_reads_is_read_before() -> None:
    """The sum of squares is no ancestor of a gradient, only of the loss."""
    forward = (
        "hidden = MatMul(x, a)  squares = Mul(a, a)  penalty = ReduceSum<keepdims = 0>(squares)  "
        "wide = MatMul(hidden, b)  y = Add(wide, penalty)"
    )
    assert run(trained(forward, "ab")) >= with_state("b")
