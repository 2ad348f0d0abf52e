"""Updates in place give the bits that two sets of tensors give, and happen only where all readers have run before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import onnx.parser
import onnxruntime
import pytest
import torch
from command_runs import Run, runner
from hypothesis import strategies as st

import gradfuse
from gradfuse import TrainingSession, TrainingStep, optimizers
from gradfuse.checking.order import observed
from gradfuse.models.arrays import Arrays
from gradfuse.passes.recompute import peak_of
from gradfuse.training import in_place
from gradfuse.training import session as session_module

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
    shapes = {"a": (SIDE, SIDE), "b": (SIDE, SIDE), "c": (SIDE,), "d": (SIDE,)}
    numbers = np.random.default_rng(0)
    values = ", ".join(f"float[{','.join(map(str, shapes[name]))}] {name}" for name in parameters)
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> forward (float[4, {SIDE}] x) => (float[4, {SIDE}] y) '
        f"<{values}> {{ {forward} }}"
    )
    for name in parameters:
        array = numbers.standard_normal(shapes[name]).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    options = {"optimizer": optimizers.AdamW(lr=0.05)} | options
    return gradfuse.build_training_step(model, loss, **options)


def batches(step: TrainingStep, rows: int) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    numbers = np.random.default_rng(1)
    pairs = [tuple(numbers.standard_normal((2, rows, SIDE)).astype(np.float32)) for _ in range(STEPS)]
    classes = any(
        value.type.tensor_type.elem_type == onnx.TensorProto.INT64
        for value in step.model.graph.input
        if value.name in step.target_names
    )
    return [(x, np.argmax(y, 1)) if classes else (x, y) for x, y in pairs]


def by_two_sets(step: TrainingStep, rows: int) -> tuple[list[float], Arrays]:
    """Losses, parameters and state of steps that get arrays and give new ones."""
    options = onnxruntime.SessionOptions()
    gradfuse.register(options)
    session = onnxruntime.InferenceSession(step.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    values: Arrays = step.parameters | step.buffers | step.optimizer_state | step.hyperparameters
    losses = []
    for x, y in batches(step, rows):
        batch = {step.input_names[0]: x, **({step.target_names[0]: y} if step.target_names else {})}
        results = dict(zip(names, session.run(names, values | batch), strict=True))
        losses.append(float(results["loss"]))
        values = values | {name.removesuffix(".updated"): array for name, array in results.items() if name != "loss"}
    return losses, values


def places(session: TrainingSession) -> Mapping[str, int]:
    return {name: value.data_ptr() for name, value in session.ort_values.items()}


def run(step: TrainingStep, rows: int = 4) -> set[str]:
    """Compare a session with steps on two sets; return what was updated in place."""
    session = TrainingSession(step)
    losses, at = [], [places(session)]
    for x, y in batches(step, rows):
        losses.append(session.step(x, y if step.target_names else ()))
        at.append(places(session))
    expected_losses, expected = by_two_sets(step, rows)
    np.testing.assert_array_equal(losses, expected_losses)
    for name, value in session.ort_values.items():
        np.testing.assert_array_equal(value.numpy(), expected[name], strict=True)
    changed = [output.name.removesuffix(".updated") for output in step.model.graph.output if output.name != "loss"]
    return {name for name in changed if at[0][name] == at[1][name]}


@pytest.fixture(params=["late", "early"], autouse=True)
def when(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of small models run last; each is tried as those of large ones, too."""
    if request.param == "early":
        monkeypatch.setattr(in_place, "_LARGE", 0)


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


@pytest.mark.parametrize("factor", ["Identity(one)", "Div(length, length)"])
def test_gradients_that_constants_leave_another_parameter_keep_it_too(factor: str) -> None:
    """The factor is 1 once onnxruntime has folded it, and the gradient of a is b itself."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> forward (float[4, {SIDE}] x) => (float y) '
        f"<float[{SIDE}, {SIDE}] a, float[{SIDE}, {SIDE}] b> {{ one = Constant<value = float {{1.0}}>() "
        f"shape = Shape(a)  first = Constant<value = int64 {{0}}>()  size = Gather(shape, first)  "
        f"length = Cast<to = 1>(size)  factor = {factor}  scaled = Mul(b, factor)  products = Mul(a, scaled)  "
        "total = ReduceSum<keepdims = 0>(products)  far = ReduceSum<keepdims = 0>(x)  y = Add(total, far) }"
    )
    numbers = np.random.default_rng(0)
    for name in "ab":
        array = numbers.standard_normal((SIDE, SIDE)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    step = gradfuse.build_training_step(model, None, optimizer=optimizers.AdamW(lr=0.05))
    assert not run(step) & {"a", "b"}


def test_a_cross_entropy_runs_the_loss_first_and_gives_the_same_bits() -> None:
    step = trained(*FORWARD["two layers"], loss="cross_entropy")
    assert run(step) >= with_state("a", "b")


def test_parameters_that_gradients_are_computed_from_are_updated_in_place() -> None:
    step = trained(
        "normal = LayerNormalization<axis = -1>(x, c)  scaled = Mul(normal, d)  y = MatMul(scaled, b)", "bcd"
    )
    assert run(step) >= with_state("b", "c", "d")


AVERAGES: list[Any] = [optimizers.EMA(decay=0.5), optimizers.SWA(start=1, every=2)]


@pytest.mark.parametrize("average", AVERAGES, ids=["ema", "swa"])
def test_what_averages_read_is_updated_in_place(average: Any) -> None:
    assert run(trained(*FORWARD["two layers"], average=average)) == with_state("a", "b", "c")


def test_a_weight_decay_of_run_time_leaves_the_state_and_momentum_in_place() -> None:
    step = trained(*FORWARD["two layers"], run_time=["weight_decay"])
    assert run(step) == with_state("a", "b", "c") - {"a", "b", "c"}
    sgd = optimizers.SGD(lr=0.05, momentum=0.9, weight_decay=0.1)
    step = trained(*FORWARD["two layers"], optimizer=sgd, run_time=["weight_decay"])
    assert run(step) == {"a", "b", "c", *(f"{name}.momentum_buffer" for name in "abc")}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_updates_in_place(momentum: float) -> None:
    step = trained(*FORWARD["two layers"], optimizer=optimizers.SGD(lr=0.05, momentum=momentum, weight_decay=0.1))
    assert run(step) >= {"a", "b", *(("a.momentum_buffer", "b.momentum_buffer") if momentum else ())}


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
    losses, values = by_two_sets(fused, 4)
    assert losses == by_two_sets(trained(*FORWARD["two layers"], max_grad_norm=0.1), 4)[0]
    expected_losses, expected = by_two_sets(plain, 4)
    eps = float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(losses, expected_losses, rtol=8 * eps)
    assert expected["step"] == values["step"] == STEPS


def test_options_without_the_library_have_two_sets() -> None:
    step = trained(*FORWARD["two layers"])
    session = TrainingSession(step, session_options=onnxruntime.SessionOptions())
    before = places(session)
    x, y = batches(step, 4)[0]
    session.step(x, y)
    assert all(before[name] != places(session)[name] for name in with_state("a", "b", "c"))


def test_what_a_penalty_reads_is_read_before() -> None:
    """The sum of squares is no ancestor of a gradient, only of the loss."""
    forward = (
        "hidden = MatMul(x, a)  squares = Mul(a, a)  penalty = ReduceSum<keepdims = 0>(squares)  "
        "wide = MatMul(hidden, b)  y = Add(wide, penalty)"
    )
    assert run(trained(forward, "ab")) >= with_state("b")


BINARY = ("Add", "Sub", "Mul", "MatMul")
UNARY = (
    "Transpose<perm = [1, 0]>({})",
    "Reshape({}, square)",
    "Identity({})",
    "Relu({})",
    "Tanh({})",
    "Softmax<axis = -1>({})",
    "Mul({}, one)",
    "Add(zero, {})",
    "Where(yes, {}, x)",
    "Gather<axis = 0>({}, rows)",
    "Slice({}, begin, end)",
    "Cast<to = 1>({})",
    "Dropout({})",
    "LayerNormalization<axis = -1>({}, c)",
)


@st.composite
def any_forward(draw: st.DrawFn) -> str:
    """Nodes that mix the parameters a, b, c and the input, all of side 6, with much that onnxruntime takes away."""
    known, nodes = ["x", "a", "b"], []
    for k in range(draw(st.integers(2, 9))):
        if draw(st.booleans()):
            operands = draw(st.tuples(st.sampled_from(known), st.sampled_from(known)))
            text = f"{draw(st.sampled_from(BINARY))}({', '.join(operands)})"
        else:
            text = draw(st.sampled_from(UNARY)).format(draw(st.sampled_from(known)))
        nodes.append(f"v{k} = {text}")
        known.append(f"v{k}")
    last = draw(st.sampled_from(BINARY))
    return "  ".join([*nodes, f"mixed = {last}({known[-1]}, a)", "y = Mul(mixed, b)"])


@pytest.mark.long
@hypothesis.settings(
    max_examples=200, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None
)
@hypothesis.given(any_forward(), st.sampled_from([None, *AVERAGES]))
def test_any_graph_gives_the_bits_of_two_sets(forward: str, average: Any) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> forward (float[{SIDE}, {SIDE}] x) => (float[{SIDE}, {SIDE}] y) '
        f"<float[{SIDE}, {SIDE}] a, float[{SIDE}, {SIDE}] b, float[{SIDE}] c, int64[2] square = {{{SIDE}, {SIDE}}}, "
        f"int64[{SIDE}] rows = {{0, 1, 2, 3, 4, 5}}, int64[1] begin = {{0}}, int64[1] end = {{{SIDE}}}, "
        "float one = {1.0}, float zero = {0.0}, bool yes = {1}> { " + forward + " }"
    )
    numbers = np.random.default_rng(0)
    for name in "abc":
        array = numbers.standard_normal((SIDE, SIDE) if name in "ab" else SIDE).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    step = gradfuse.build_training_step(
        model, "mse", frozen=["one", "zero"], optimizer=optimizers.AdamW(lr=0.05), average=average
    )
    run(step, rows=SIDE)


def deep(layers: int, side: int, **options: Any) -> TrainingStep:
    """A step of layers of equal weights' sizes, which activations of a few rows are small beside."""
    nodes = "  ".join(f"h{i} = MatMul(v{i}, w{i})  v{i + 1} = Tanh(h{i})" for i in range(layers))
    weights = ", ".join(f"float[{side},{side}] w{i}" for i in range(layers))
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> forward (float[4, {side}] x) => (float[4, {side}] y) '
        f"<{weights}> {{ v0 = Identity(x) {nodes} y = Identity(v{layers}) }}"
    )
    numbers = np.random.default_rng(0)
    for index in range(layers):
        array = (numbers.standard_normal((side, side)) / side**0.5).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"w{index}"))
    return gradfuse.build_training_step(model, "mse", **({"optimizer": optimizers.SGD(lr=0.05)} | options))


@pytest.mark.parametrize("optimizer", [optimizers.SGD(lr=0.05), optimizers.AdamW(lr=0.05)])
def test_few_gradients_are_in_memory_where_updates_run_early(
    monkeypatch: pytest.MonkeyPatch, optimizer: optimizers.SGD | optimizers.AdamW
) -> None:
    layers, side = 8, 64
    step = deep(layers, side, optimizer=optimizer)
    x, y = np.random.default_rng(1).standard_normal((2, 4, side)).astype(np.float32)
    feeds = step.initial_values | {step.input_names[0]: x, step.target_names[0]: y}
    peaks = []
    for large in (0, 2**60):
        monkeypatch.setattr(in_place, "_LARGE", large)
        peaks.append(peak_of(observed(in_place.with_ordered_updates(step.model).model, feeds, "test").model))
    early, late = (peak / (4 * side * side) for peak in peaks)
    assert late >= layers
    # That of a layer, of the one before it, whose gradient reads the first's weight, and the activations.
    assert early <= 3


def test_all_gradients_are_there_before_a_norm_of_all_of_them_clips() -> None:
    step = deep(4, SIDE, max_grad_norm=0.1)
    assert run(step) == {f"w{index}" for index in range(4)}


def tied(
    lookups: int,
    padding_idx: int | None = None,
    *,
    depth: int = 1,
    shape: tuple[int, int] = (5, 7),
    width: int = SIDE,
    decay: float = 0.0,
    **options: Any,
) -> TrainingStep:
    """A step of a classifier whose weight is also that of `lookups` embeddings."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, width, padding_idx=padding_idx)
            self.head = torch.nn.Linear(width, 11, bias=False)
            self.head.weight = self.embed.weight
            self.positions = torch.nn.Parameter(torch.zeros(shape[1], width))
            self.between = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.positions + sum(self.embed(ids.roll(shift, 1)) for shift in range(lookups))
            for layer in self.between:
                x = torch.tanh(layer(x))
            x = self.head(x)
            return x + decay * (self.head.weight**2).mean(1) if decay else x  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module = Tied()
    ids = torch.randint(0, 11, shape)
    return gradfuse.export_training_step(
        module,
        lambda logits, labels: torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        (ids, ids.roll(-1, 1)),
        torch.optim.AdamW(module.parameters(), lr=0.05),
        **options,
    )


@pytest.mark.parametrize(
    ("lookups", "padding_idx", "options"),
    [
        (1, None, {}),
        (1, 3, {}),
        (2, None, {}),
        (1, None, {"width": 1, "decay": 1.0}),
        # What is computed again waits for gradients, but not for those that are added.
        (1, None, {"depth": 16, "shape": (64, 32), "memory_budget": 0.8}),
    ],
    ids=["one", "padding", "two", "third term", "budget"],
)
def test_gradients_of_tied_embeddings_are_added_where_those_of_the_head_are(
    lookups: int, padding_idx: int | None, options: dict[str, Any]
) -> None:
    step = tied(lookups, padding_idx, **options)
    ordered = in_place.with_ordered_updates(step.model, step.own_names).model
    operators = [node.op_type for node in ordered.graph]
    assert operators.count("EmbeddingDenseBackwardAdd") == lookups
    assert "EmbeddingDenseBackward" not in operators
    session = TrainingSession(step)
    plain_options = onnxruntime.SessionOptions()
    gradfuse.register(plain_options)
    plain = onnxruntime.InferenceSession(
        step.model.SerializeToString(), plain_options, providers=["CPUExecutionProvider"]
    )
    names, values = [output.name for output in plain.get_outputs()], step.initial_values
    numbers = np.random.default_rng(1)
    for _ in range(STEPS):
        ids, labels = numbers.integers(0, 11, (2, *options.get("shape", (5, 7))))
        loss = session.step(ids, labels)
        batch = {step.input_names[0]: ids, step.target_names[0]: labels}
        results = dict(zip(names, plain.run(names, values | batch), strict=True))
        assert loss == results["loss"]
        values = values | {name.removesuffix(".updated"): array for name, array in results.items() if name != "loss"}
    for name, value in session.ort_values.items():
        np.testing.assert_array_equal(value.numpy(), values[name], strict=True)


class FailsAfterItsRun:
    """A session of onnxruntime that runs out of memory at the end of a run."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def run_with_iobinding(self, binding: Any) -> None:
        self._session.run_with_iobinding(binding)
        raise onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException("bad allocation")


def test_a_step_that_fails_between_its_updates_is_not_gone_on_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = deep(3, SIDE)
    x, y = np.random.default_rng(1).standard_normal((2, 4, SIDE)).astype(np.float32)
    session = TrainingSession(step)
    other = TrainingSession(step, share_with=session)
    session.step(x, y)
    before = session.state_dict()
    session.save(tmp_path / "before.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(session, "_session", FailsAfterItsRun(session._session))
        with pytest.raises(gradfuse.ModelError, match="bad allocation"):
            session.step(x, y)
    for call in (
        lambda: session.step(x, y),
        lambda: other.step(x, y),
        lambda: session.evaluate(x),
        session.state_dict,
        lambda: session.save(tmp_path / "after.safetensors"),
        lambda: session.save_evaluation_model(tmp_path / "after.onnx"),
    ):
        with pytest.raises(gradfuse.GradfuseError, match="after it had updated some parameters; expected `load`"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["before.safetensors"]
    session.load(tmp_path / "before.safetensors")
    for name, array in session.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    assert session.step_count == 1
    session.step(x, y)
    assert session.step_count == 2


def test_a_batch_that_is_refused_within_the_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = tied(1)
    session = TrainingSession(step)
    before = session.state_dict()
    ids = np.zeros((5, 7), np.int64)
    monkeypatch.setattr(session_module, "require_in_range", lambda *_: None)
    with pytest.raises(gradfuse.ModelError):
        session.step(ids, ids + 11)
    for name, array in session.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    session.step(ids, ids)


def test_tied_embeddings_train_without_the_library_s_kernels() -> None:
    step, options = tied(1), onnxruntime.SessionOptions()
    ids = np.random.default_rng(1).integers(0, 11, (5, 7))
    own, plain = TrainingSession(step), TrainingSession(step, session_options=options)
    for _ in range(STEPS):
        np.testing.assert_allclose(own.step(ids, ids), plain.step(ids, ids), rtol=1e-5)


def test_updates_wait_for_all_of_a_function_that_reads_what_they_overwrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime may put the nodes of a function into the graph, where one reads `a` long after the first is done."""
    monkeypatch.setattr(in_place, "_LARGE", 0)
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17, "aclnn" : 1, "own" : 1]>
        step (float[{SIDE}, {SIDE}] x, float[{SIDE}, {SIDE}] a, float[{SIDE}, {SIDE}] b, float learning_rate)
            => (float loss, float[{SIDE}, {SIDE}] a_updated, float[{SIDE}, {SIDE}] b_updated) {{
            early, late = own.Both(x, a)
            loss = ReduceSum<keepdims = 0>(early)
            a_grad = MatMul(early, x)
            turned = Tanh(late)
            b_grad = MatMul(turned, x)
            a_updated = aclnn.ApplySgd(a, a_grad, learning_rate)
            b_updated = aclnn.ApplySgd(b, b_grad, learning_rate)
        }}
        <domain: "own", opset_import: ["" : 17]> Both (x, a) => (early, late)
        {{ early = Exp(x)  late = MatMul(x, a) }}"""
    )
    graph = in_place.with_ordered_updates(model, {"a.updated": "a_updated", "b.updated": "b_updated"}).model.graph
    update = next(node for node in graph if "a_updated" in [value.name for value in node.outputs])
    behind, rest = set(), [update]
    while rest:
        read = [value for value in rest.pop().inputs if value is not None]
        behind |= {value.name for value in read}
        rest += [node for value in read if (node := value.producer()) is not None]
    assert "b_grad" in behind
