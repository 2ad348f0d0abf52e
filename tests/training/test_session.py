"""`TrainingSession`: trains as PyTorch does, without copies between steps, and stops and goes on without a trace."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training.models import SHAPES, Mlp, Whole, assert_trained, batches, groups, train

import gradfuse
from gradfuse import ArgumentError, GradfuseError, ModelError, TrainingSession, TrainingStep, export_training_step
from gradfuse.training.step import METADATA_KEY

DATA = batches(40, 4)
CLIPPED = 0.5


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(module), lr=0.01, amsgrad=True)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return Whole()


@pytest.fixture(scope="module")
def step(module: nn.Module) -> TrainingStep:
    return export_training_step(
        module, F.cross_entropy, DATA[0], make_optimizer(module), dynamic_shapes=SHAPES, max_grad_norm=CLIPPED
    )


@pytest.fixture(scope="module")
def gradient_step() -> TrainingStep:
    torch.manual_seed(0)
    return export_training_step(Mlp(), F.cross_entropy, batches(1, 3)[0], fuse=False)


def test_it_trains_as_torch_does(module: nn.Module, step: TrainingStep) -> None:
    session = TrainingSession(step)
    losses = [session.step(x, y.numpy()) for x, y in DATA]
    native, trained = train(module, make_optimizer, DATA, torch.float32, max_grad_norm=CLIPPED)
    exact, reference = train(module, make_optimizer, DATA, torch.float64, max_grad_norm=CLIPPED)
    assert_trained(session.state_dict(), trained, reference, len(DATA))
    worst = max(abs(a - b) for a, b in zip(native, exact, strict=True))
    assert max(abs(a - b) for a, b in zip(losses, exact, strict=True)) <= 4 * worst


def test_evaluation_is_the_module_in_eval_mode(module: nn.Module, step: TrainingStep) -> None:
    session = TrainingSession(step)
    for batch in DATA[:5]:
        session.step(*batch)
    # Of another size than the batch.
    x = batches(1, 4, size=13, seed=9)[0][0]
    native = copy.deepcopy(module).eval()
    native.load_state_dict({name: torch.from_numpy(array) for name, array in session.state_dict().items()})
    exact = copy.deepcopy(native).double()
    with torch.no_grad():
        wanted = exact(x.double())
        gradfuse.testing.assert_gradients_close(session.evaluate(x), native(x), wanted, np.float32, terms=wanted.max())
    loss = session.step(*DATA[5])
    other = TrainingSession(step)
    assert [other.step(*batch) for batch in DATA[:6]][-1] == loss


def test_steps_write_where_the_step_before_read(step: TrainingStep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor alternates between two buffers; and no array passes between numpy and onnxruntime but the batch and
    the loss."""
    session = TrainingSession(step)
    changing = [name for name in session.ort_values if not name.startswith(("learning_rate", "spare"))]
    addresses = [{name: session.ort_values[name].data_ptr() for name in changing}]
    passed: dict[str, list[Any]] = {"numpy": [], "update_inplace": []}

    def watched(method: str) -> Callable[..., Any]:
        original = getattr(onnxruntime.OrtValue, method)

        def call(value: Any, *arguments: Any) -> Any:
            passed[method].append(value)
            return original(value, *arguments)

        return call

    for method in passed:
        monkeypatch.setattr(onnxruntime.OrtValue, method, watched(method))
    for method in ("ortvalue_from_numpy", "ortvalue_from_shape_and_type"):
        monkeypatch.setattr(onnxruntime.OrtValue, method, None)
    losses = []
    for batch in DATA[:4]:
        losses.append(session.step(*batch))
        addresses.append({name: session.ort_values[name].data_ptr() for name in changing})
    for values in passed.values():
        assert len(values) == 4 and len({value.data_ptr() for value in values}) == 1
        assert [tuple(value.shape()) for value in values] == [()] * 4
    monkeypatch.undo()
    assert addresses[0] == addresses[2] == addresses[4]
    assert addresses[1] == addresses[3]
    assert len({*addresses[0].values(), *addresses[1].values()}) == 2 * len(changing)
    assert len(set(losses)) == 4


@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_is_the_same_bit_for_bit(step: TrainingStep, tmp_path: Path, stop: int) -> None:
    session = TrainingSession(step)
    session.learning_rate = (0.03, 0.01)
    for batch in DATA[:stop]:
        session.step(*batch)
    session.save(tmp_path / "state.safetensors")
    resumed = TrainingSession(step)
    for array in resumed.state_dict().values():
        # They are copies.
        array += 1
    resumed.step(*DATA[-1])
    resumed.load(tmp_path / "state.safetensors")
    assert resumed.learning_rate == session.learning_rate
    for batch in DATA[stop:12]:
        assert session.step(*batch) == resumed.step(*batch)
    for name, array in session.state_dict().items():
        np.testing.assert_array_equal(array, resumed.state_dict()[name], strict=True)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_files_of_torch_and_of_the_session_are_read_by_each_other(
    module: nn.Module, step: TrainingStep, tmp_path: Path
) -> None:
    session = TrainingSession(step)
    for batch in DATA[:3]:
        session.step(*batch)
    session.save(tmp_path / "ours.safetensors", optimizer=False)
    other = copy.deepcopy(module)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "ours.safetensors"))
    for name, tensor in other.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), session.state_dict()[name], strict=True)
    # torch's writer keeps one name only of what is tied.
    safetensors.torch.save_model(module, str(tmp_path / "torch.safetensors"))
    session.load(tmp_path / "torch.safetensors")
    fresh = TrainingSession(step)
    assert [session.step(*batch) for batch in DATA[:5]] == [fresh.step(*batch) for batch in DATA[:5]]
    session.load_state_dict(other.state_dict())
    np.testing.assert_array_equal(session.state_dict()["again.weight"], other.state_dict()["embed.weight"].numpy())


def test_a_file_holds_the_optimizer_state_under_the_names_of_torch(step: TrainingStep, tmp_path: Path) -> None:
    session = TrainingSession(step)
    session.step(*DATA[0])
    session.save(tmp_path / "state.safetensors")
    stored = safetensors.numpy.load_file(tmp_path / "state.safetensors")
    states = {f"out.weight.{state}" for state in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    assert set(stored) >= states | {"step", "learning_rate", "learning_rate.1", "again.weight", "embed.weight"}
    assert stored["step"] == 1


def test_a_saved_step_trains_without_torch(step: TrainingStep, tmp_path: Path) -> None:
    session = TrainingSession(step)
    expected = [session.step(*batch) for batch in DATA[:3]]
    step.save(tmp_path / "step.onnx")
    arrays = {f"{key}{index}": batch[at].numpy() for index, batch in enumerate(DATA[:3]) for at, key in enumerate("xy")}
    np.savez(tmp_path / "data.npz", **arrays)  # type: ignore[arg-type]
    code = (
        "import sys, numpy; sys.modules['torch'] = None; from gradfuse import TrainingSession\n"
        "session, data = TrainingSession('step.onnx'), numpy.load('data.npz')\n"
        "for i in range(3): print(repr(session.step(data[f'x{i}'], data[f'y{i}'])))\n"
        "session.save('state.safetensors'); session.load('state.safetensors')\n"
        "print(*session.evaluate(data['x0']).shape)\n"
        "assert 'onnxscript' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [float(line) for line in lines[:3]] == expected
    assert lines[3] == "8 4"


def test_steps_without_an_optimizer_give_gradients(gradient_step: TrainingStep) -> None:
    session = TrainingSession(gradient_step)
    with pytest.raises(GradfuseError, match="gradients: no step was run"):
        _ = session.gradients
    (batch,) = batches(1, 3)
    losses = []
    for _ in range(5):
        losses.append(session.step(*batch))
        gradients = session.gradients
        session.load_state_dict({name: array - gradients[name] for name, array in session.state_dict().items()})
    assert losses == sorted(losses, reverse=True)
    module = Mlp()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in gradient_step.parameters.items()})
    native, _ = train(module, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), [batch] * 5, torch.float64)
    assert losses == pytest.approx(native, abs=5 * 2**-20)
    with pytest.raises(GradfuseError, match="learning_rate: the step has no optimizer"):
        session.learning_rate = 0.1
    with pytest.raises(GradfuseError, match="evaluate: the step has no evaluation model; expected one"):
        session.evaluate(batch[0])


def test_batches_are_tensors_arrays_tuples_or_dictionaries(step: TrainingStep) -> None:
    x, y = DATA[0]
    forms: list[tuple[Any, Any]] = [(x, y), (x.numpy(), y.numpy()), ((x,), [y]), ({"x": x}, {"target": y.numpy()})]
    forms.append((np.asfortranarray(x.numpy()), y.requires_grad_(False)))
    assert len({TrainingSession(step).step(*form) for form in forms}) == 1


def test_a_checkpoint_does_not_take_the_place_of_the_step_or_a_pipe(step: TrainingStep, tmp_path: Path) -> None:
    path, link, pipe = tmp_path / "step.onnx", tmp_path / "state.safetensors", tmp_path / "pipe"
    step.save(path)
    before = path.read_bytes()
    link.symlink_to(path)
    os.mkfifo(pipe)
    session = TrainingSession(path)
    for target, reason in (
        (path, "which the input is read from"),
        (link, "which the input is read from"),
        (pipe, "is a named pipe"),
    ):
        with pytest.raises(ModelError, match=reason):
            session.save(target)
    assert path.read_bytes() == before and link.is_symlink() and pipe.is_fifo()
    session.save(tmp_path / "state")
    session.save(tmp_path / "state")
    assert {p.name for p in tmp_path.iterdir()} == {"step.onnx", "step.eval.onnx", link.name, "pipe", "state"}


def test_a_session_goes_on_in_another_folder(
    step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    step.save("step.onnx")
    session = TrainingSession("step.onnx")
    before = (tmp_path / "step.onnx").read_bytes()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert session.training_step.input_names == step.input_names
    for path in (tmp_path / "step.onnx", tmp_path / "step.eval.onnx"):
        for save in (session.save, session.save_evaluation_model):
            with pytest.raises(ModelError, match="which the input is read from"):
                save(path)
    assert (tmp_path / "step.onnx").read_bytes() == before


def test_another_step_in_the_place_of_the_file_changes_nothing(step: TrainingStep, tmp_path: Path) -> None:
    path, weights = tmp_path / "step.onnx", tmp_path / "weights.safetensors"
    step.save(path)
    session = TrainingSession(path)
    session.save(weights, optimizer=False)
    rates, evaluated = session.learning_rate, session.evaluate(DATA[0][0])
    other = {name: array * 2 for name, array in step.hyperparameters.items()}
    dataclasses.replace(step, hyperparameters=other).save(path)
    session.load(weights)
    assert session.learning_rate == rates
    assert np.array_equal(session.evaluate(DATA[0][0]), evaluated)
    with pytest.raises(ModelError, match=r"step\.onnx has changed since; expected the file that the session was made"):
        session.training_step  # noqa: B018


def test_the_evaluation_model_is_saved_beside_the_step(step: TrainingStep, tmp_path: Path) -> None:
    step.save(tmp_path / "step.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"step.onnx", "step.eval.onnx"}
    loaded = TrainingStep.load(tmp_path / "step.onnx")
    for field in ("parameters", "buffers", "optimizer_state", "hyperparameters", "constants"):
        mine, other = getattr(loaded, field), getattr(step, field)
        assert list(mine) == list(other)
        for name, array in mine.items():
            np.testing.assert_array_equal(array, other[name], strict=True)
    assert loaded.state_dict_names == step.state_dict_names
    (tmp_path / "step.eval.onnx").unlink()
    session = TrainingSession(tmp_path / "step.onnx")
    assert session.step(*DATA[0]) == TrainingSession(step).step(*DATA[0])
    with pytest.raises(GradfuseError, match="no evaluation model"):
        session.evaluate(DATA[0][0])


def test_the_trained_module_is_served_from_a_file_of_its_own(step: TrainingStep, tmp_path: Path) -> None:
    step.save(tmp_path / "step.onnx")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    session = TrainingSession(tmp_path / "step.onnx")
    for batch in DATA[:3]:
        session.step(*batch)
    for name, error in (("step.onnx", ModelError), ("step.eval.onnx", ModelError), (None, ArgumentError)):
        with pytest.raises(error):
            session.save_evaluation_model(tmp_path / name if name else 3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="which the input is read from"):
        session.save(tmp_path / "step.eval.onnx")
    session.save_evaluation_model(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["x"]
    served = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    trained = session.evaluate(X)
    np.testing.assert_allclose(served.run(None, {"x": X.numpy()})[0], trained, rtol=1e-6, atol=1e-6)
    session.step(*DATA[3])
    assert not np.array_equal(session.evaluate(X), trained)
    np.testing.assert_allclose(served.run(None, {"x": X.numpy()})[0], trained, rtol=1e-6, atol=1e-6)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    without = TrainingSession(dataclasses.replace(step, evaluation_model=None))
    with pytest.raises(GradfuseError, match="save_evaluation_model: the step has no evaluation model"):
        without.save_evaluation_model(tmp_path / "other.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {*before, "model.onnx"}


def test_a_fused_file_trains_on(step: TrainingStep, tmp_path: Path) -> None:
    plain = dataclasses.replace(step, model=gradfuse.expand(step.model))
    plain.save(tmp_path / "step.onnx")
    result = gradfuse.fuse(str(tmp_path / "step.onnx"))
    assert "CrossEntropyLossGrad" in {fusion.op for fusion in result.report.fusions}
    (tmp_path / "fused.onnx").write_bytes(result.model.SerializeToString())
    session, other = TrainingSession(tmp_path / "fused.onnx"), TrainingSession(step)
    assert [session.step(*batch) for batch in DATA[:3]] == pytest.approx([other.step(*batch) for batch in DATA[:3]])
    assert session.evaluate(DATA[0][0]).shape == (8, 4)


def test_several_outputs_are_a_tuple_and_names_do_not_clash() -> None:
    class Two(Mlp):
        def forward(self, x: Tensor) -> Any:
            return {"logits": super().forward(x), "twice": 2 * x}

    class Output(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.output

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target)

    (batch,) = batches(1, 3)
    session = TrainingSession(export_training_step(Two(), loss, batch, fuse=False, evaluation=True))
    logits, twice = session.evaluate(batch[0])
    assert logits.shape == (8, 3)
    np.testing.assert_array_equal(twice, 2 * batch[0].numpy())
    step = export_training_step(Output(), F.cross_entropy, batch, fuse=False, evaluation=True)
    assert step.evaluation_model is not None
    assert [value.name for value in step.evaluation_model.graph.output] == ["output_"]
    assert TrainingSession(step).evaluate(batch[0]).shape == (8, 3)


def test_parameters_of_a_loss_train_too(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
            return weight * F.cross_entropy(output * self.scale, target)

    module, loss, ((x, y),) = Mlp(), Scaled(), batches(1, 3)
    batch = x, (y, torch.tensor(0.5))
    optimizer = torch.optim.SGD([*module.parameters(), *loss.parameters()], lr=0.1)
    session = TrainingSession(export_training_step(module, loss, batch, optimizer, fuse=False))
    session.step(*batch)
    optimizer.zero_grad()
    loss(module(x), *batch[1]).backward()
    optimizer.step()
    assert session.state_dict()["loss.scale"] == pytest.approx(loss.scale.item(), abs=2**-22)
    session.save(tmp_path / "state.safetensors")
    session.load(tmp_path / "state.safetensors")


X, Y = DATA[0]
LOADING = "TrainingSession.load_state_dict: "
MISUSES: list[tuple[Callable[[TrainingSession], Any], str]] = [
    (
        lambda s: s.step(X.double(), Y),
        "TrainingSession.step: 'x' is float64 of shape (8, 4); expected float32 of shape (batch, 4)",
    ),
    (lambda s: s.step(X[:, :3], Y), "'x' is float32 of shape (8, 3); expected float32 of shape (batch, 4)"),
    (lambda s: s.step(X, Y[:3]), "'target' is int64 of shape (3,); expected int64 of shape (batch,), batch = 8"),
    (lambda s: s.step((X, X), Y), "TrainingSession.step: inputs are 2; expected 1: x"),
    (lambda s: s.step({"y": X}, Y), "TrainingSession.step: inputs lack 'x'; expected x"),
    (lambda s: s.evaluate({"x": X, "y": 1}), "TrainingSession.evaluate: inputs have 'y'; expected x"),
    (lambda s: s.evaluate(X[0]), "TrainingSession.evaluate: 'x' is float32 of shape (4,)"),
    (lambda s: s.load_state_dict({"w": X}), LOADING + "'w' is unknown; expected the names of state_dict()"),
    (lambda s: s.load_state_dict({}), LOADING + "'embed.weight' is missing; expected all names of state_dict()"),
    (
        lambda s: s.load_state_dict({"norm.bias": np.ones(5, np.float32)}, strict=False),
        LOADING + "'norm.bias' is float32 of shape (5,); expected float32 of shape (6,)",
    ),
    (
        lambda s: s.load_state_dict({**s.state_dict(), "frozen.bias": np.ones(6, np.float32)}),
        LOADING + "'frozen.bias' is a constant of the model; expected its value",
    ),
    (
        lambda s: s.load_state_dict({**s.state_dict(), "again.weight": np.ones((6, 4), np.float32)}),
        LOADING + "'again.weight' differs from 'embed.weight'; expected equal values, as tied",
    ),
    *(
        (lambda s, rate=rate: setattr(s, "learning_rate", rate), "; expected a number or one each of 2")
        for rate in (
            [1.0],
            np.ones(3),
            np.ones((30, 30)),
            torch.ones(1, 2),
            None,
            "0.1",
            [0.1, None],
            True,
            [True, False],
            1j,
            {0: 0.1},
            2**70,
            np.array(["1", "2"]),
            torch.tensor(0.1, device="meta"),
            torch.tensor(0.1).bfloat16(),
            np.ma.masked,
            object(),
        )
    ),
    *(
        (lambda s, rate=rate: setattr(s, "learning_rate", rate), f"is {rate}; expected finite numbers from 0 on")
        for rate in (-1, -1e-30, float("nan"), float("inf"), 1e39, [0.1, -0.1], [float("nan"), 0.1])
    ),
    *(
        (
            lambda s, value=value: s.load_state_dict({**s.state_dict(), "norm.bias": value}),
            LOADING + f"'norm.bias' {fault}; expected float32 of shape (6,)",
        )
        for value, fault in (
            (np.ones(6), "is float64 of shape (6,)"),
            ([1.0] * 6, "is float64 of shape (6,)"),
            (np.ones(6, ">f4"), "is >f4 of shape (6,)"),
            (np.ones((6, 1), np.float32), "is float32 of shape (6, 1)"),
            (None, "is None"),
            (np.ma.array(np.ones(6, np.float32), mask=True), "is a masked array"),
            (torch.ones(6, device="meta"), "cannot be an array: Cannot copy out of meta tensor; no data!"),
            (torch.ones(6).bfloat16(), "cannot be an array: Got unsupported ScalarType BFloat16"),
        )
    ),
    (
        lambda s: s.load_state_dict([("norm.bias", X)]),  # type: ignore[arg-type]
        LOADING + "state_dict is list; expected a mapping of names to arrays",
    ),
    (
        lambda s: s.load_state_dict({**s.state_dict(), None: X}),  # type: ignore[dict-item]
        LOADING + "None is unknown; expected the names of state_dict()",
    ),
    (
        lambda s: s.step(X.bfloat16(), Y),
        "step: 'x' cannot be an array: Got unsupported ScalarType BFloat16; expected float32 of shape (batch, 4)",
    ),
    (lambda s: s.step(X.tolist(), Y), "step: inputs are 8; expected 1: x"),
    (lambda s: s.step([X.tolist()], Y), "step: 'x' is float64 of shape (8, 4); expected float32 of shape (batch, 4)"),
    (lambda s: s.step(None, Y), "step: inputs are 0; expected 1: x"),
    (lambda s: s.step(X), "step: targets are 0; expected 1: target"),
    (lambda s: s.step((None,), Y), "step: 'x' is None; expected float32 of shape (batch, 4)"),
    (lambda s: s.step(X, Y.int()), "step: 'target' is int32 of shape (8,); expected int64 of shape (batch,)"),
    (lambda s: s.step(X.numpy().astype(">f4"), Y), "step: 'x' is >f4 of shape (8, 4); expected float32"),
    (lambda s: s.step(X, np.ma.array(Y.numpy(), mask=True)), "step: 'target' is a masked array; expected int64"),
    (lambda s: s.step(X[:0], Y[:0]), "step: 'x' is float32 of shape (0, 4); expected at least one element"),
    (
        lambda s: s.evaluate(X.double()),
        "evaluate: 'x' is float64 of shape (8, 4); expected float32 of shape (batch, 4)",
    ),
    *(
        (lambda s, path=path, method=method: getattr(s, method)(path), f"{method}: path is {path}; expected a path")
        for path in (None, 3)
        for method in ("save", "load")
    ),
    (lambda s: TrainingSession(s.training_step.model), "step is ModelProto; expected a TrainingStep or a path"),
    *(
        (
            lambda s, providers=providers: TrainingSession(s.training_step, providers),
            "expected a list of names, or of pairs of a name and its options",
        )
        for providers in ("CPUExecutionProvider", 3, [3], [("CPUExecutionProvider",)], [("CPUExecutionProvider", 3)])
    ),
]


def everything(session: TrainingSession) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in session.ort_values.items()}


def assert_unchanged(session: TrainingSession, before: dict[str, Any]) -> None:
    for name, array in everything(session).items():
        np.testing.assert_array_equal(array, before[name], strict=True)


@pytest.fixture(scope="module")
def used(step: TrainingStep) -> TrainingSession:
    """A session that nothing may change any more."""
    session = TrainingSession(step)
    session.step(X, Y)
    return session


@pytest.mark.parametrize("misuse, message", MISUSES)
def test_misuse_is_one_clear_line(
    used: TrainingSession, misuse: Callable[[TrainingSession], Any], message: str
) -> None:
    before = everything(used)
    with pytest.raises(ArgumentError) as error:
        misuse(used)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert_unchanged(used, before)


@pytest.mark.parametrize("rate", [0, 0.25, np.float16(0.25), np.array(2), torch.tensor(0.25), (0.5, 0.25), range(2)])
def test_learning_rates_are_numbers_of_any_kind(step: TrainingStep, rate: Any) -> None:
    session = TrainingSession(step)
    session.learning_rate = rate
    wanted = np.broadcast_to(np.asarray(rate, np.float64), 2)
    assert session.learning_rate == tuple(wanted)


def test_parameters_can_be_exchanged_without_copies() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y)
        <float[2, 2] a = {1, 2, 3, 4}, float[2, 2] b = {5, 6, 7, 8}> { h = MatMul(x, a)  y = MatMul(h, b) }"""
    )
    session = TrainingSession(gradfuse.build_training_step(model, "mse"))
    before, values = session.state_dict(), session.ort_values
    session.load_state_dict({"a": values["b"].numpy(), "b": values["a"].numpy()})
    after = session.state_dict()
    assert np.array_equal(after["a"], before["b"]) and np.array_equal(after["b"], before["a"])


def test_arrays_may_lie_in_memory_in_any_way(step: TrainingStep) -> None:
    session, plain = TrainingSession(step), np.arange(6, dtype=np.float32)
    unaligned = np.frombuffer(b"." + plain.tobytes(), np.float32, offset=1)
    for array in (plain[::-1], np.repeat(plain, 2)[::2], np.broadcast_to(plain[2], 6), unaligned):
        session.load_state_dict({"norm.bias": array}, strict=False)
        np.testing.assert_array_equal(session.state_dict()["norm.bias"], array.copy(), strict=True)
    x, y = X.numpy(), Y.numpy()
    forms = [
        (x, y),
        (np.repeat(x, 2, 1)[:, ::2], np.repeat(y, 2)[::2]),
        (np.ascontiguousarray(x[::-1])[::-1], np.ascontiguousarray(y[::-1])[::-1]),
        (
            np.frombuffer(b"." + x.tobytes(), np.float32, offset=1).reshape(8, 4),
            np.frombuffer(b"." + y.tobytes(), np.int64, offset=1),
        ),
    ]
    assert len({TrainingSession(step).step(*form) for form in forms}) == 1


def test_a_step_that_fails_leaves_all_as_it_was(
    step: TrainingStep, gradient_step: TrainingStep, capfd: pytest.CaptureFixture[str]
) -> None:
    # Without what a session checks ahead of onnxruntime.
    step, gradient_step = (dataclasses.replace(one, index_ranges={}) for one in (step, gradient_step))
    session, other = TrainingSession(step), TrainingSession(step)
    assert session.step(X, Y) == other.step(X, Y)
    before = everything(session)
    for label in (99, -1, 2**62):
        with pytest.raises(ModelError, match=rf"TrainingSession\.step: .*target\[0\] is {label}; expected a class in"):
            session.step(X, torch.full_like(Y, label))
        assert_unchanged(session, before)
    assert session.step(X, Y) == other.step(X, Y)
    assert capfd.readouterr().err == ""
    session = TrainingSession(gradient_step)
    session.step(X, Y % 3)
    assert session.gradients
    with pytest.raises(ModelError):
        session.step(X, Y + 99)
    with pytest.raises(GradfuseError, match="no step was run, or the last one has failed"):
        _ = session.gradients


def test_files_that_do_not_fit_are_refused(step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, path = TrainingSession(step), tmp_path / "state.safetensors"
    with pytest.raises(ModelError, match=r"state\.safetensors: cannot read the file"):
        session.load(path)
    path.write_bytes(b"no such format")
    with pytest.raises(ModelError, match=r"state\.safetensors: cannot read the file"):
        session.load(path)
    safetensors.numpy.save_file({"other": np.ones(3)}, path)
    with pytest.raises(ModelError, match=r"state\.safetensors: .*'other' is unknown"):
        session.load(path)
    safetensors.numpy.save_file({**session.state_dict(), "step": np.array(3)}, path)
    with pytest.raises(ModelError, match=r"is missing; expected all of the optimizer's state"):
        session.load(path)
    with pytest.raises(ModelError, match="cannot write"):
        session.save(tmp_path / "missing" / "state.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(GradfuseError, match=r"safetensors is not installed; expected what gradfuse\[train\] installs"):
        session.save(path)


def test_a_damaged_file_changes_nothing(step: TrainingStep, tmp_path: Path) -> None:
    session, path = TrainingSession(step), tmp_path / "state.safetensors"
    session.step(X, Y)
    session.save(path)
    content, stored = path.read_bytes(), safetensors.numpy.load_file(path)
    session.step(X, Y)
    before = everything(session)

    def assert_refused(message: str) -> None:
        with pytest.raises(ModelError, match=rf"state\.safetensors: {message}") as error:
            session.load(path)
        assert "\n" not in str(error.value)
        assert_unchanged(session, before)

    for size in (*range(0, len(content), 97), len(content) - 1):
        path.write_bytes(content[:size])
        assert_refused("cannot read the file")
    path.write_bytes(content + b"more")
    assert_refused("cannot read the file")
    for name, array, message in (
        ("norm.bias", np.ones(6), r"'norm\.bias' is float64 of shape \(6,\); expected float32 of shape \(6,\)"),
        ("step", np.array(1.0), r"'step' is float64 of shape \(\); expected int64"),
        ("step", np.array(-1), "'step' is -1; expected a count from 0 on"),
        ("learning_rate", np.array(np.nan, np.float32), "'learning_rate' is nan; expected finite numbers from 0 on"),
        ("learning_rate.1", np.array(-1, np.float32), r"'learning_rate\.1' is -1\.0; expected finite numbers from 0"),
        ("more", np.ones(1), "'more' is unknown"),
    ):
        safetensors.numpy.save_file({**stored, name: array}, path)
        assert_refused(rf"TrainingSession\.load: {message}")
    path.unlink()
    path.mkdir()
    assert_refused("is no file")
    path.rmdir()
    os.mkfifo(path)
    assert_refused("is no file")  # and is not waited for


@pytest.mark.parametrize(
    "change, message",
    [
        ({"inputs": 3}, "is not a training step saved by gradfuse"),
        ({"inputs": "x"}, "is not a training step saved by gradfuse"),
        ({"inputs": ["q"]}, "the step has no value for the input 'x'; expected one"),
        ({"inputs": ["x", "q"]}, "the step has 'q', which is no input of its model; expected only inputs"),
        ({"inputs": ["x", "x"]}, "the step has 'x' in 2 places; expected one"),
        ({"parameters": ["q"]}, "has no value for 'q'; expected one, as 'gradfuse.training_step' in its metadata says"),
        ({"hyperparameters": []}, "the step has no value for the input 'learning_rate'; expected one"),
        ({"state_dict": {"a": "q"}}, "the step has no value for 'a' of its state_dict; expected one"),
        ({"state_dict": [1]}, "is not a training step saved by gradfuse"),
        ({"index_ranges": {"q": [[3, -100]]}}, "is not a training step saved by gradfuse"),
        ({"index_ranges": {"x": [["3", None]]}}, "is not a training step saved by gradfuse"),
        ({"evaluation_model": 3}, "is not a training step saved by gradfuse"),
        ({"evaluation_model": "../other.onnx"}, "expected a file beside it"),
        ({"evaluation_model": "step.onnx"}, "the evaluation model takes 'embed.weight.exp_avg'; expected"),
    ],
)
def test_saved_steps_whose_metadata_lie_are_refused(
    step: TrainingStep, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "step.onnx"
    step.save(path)
    model = onnx.load(path)
    (stored,) = (prop for prop in model.metadata_props if prop.key == METADATA_KEY)
    stored.value = json.dumps({**json.loads(stored.value), **change})
    onnx.save(model, path)
    with pytest.raises(ModelError, match=r"step\.onnx: ") as error:
        TrainingSession(path)
    assert message in str(error.value)


def test_a_file_whose_loss_reads_a_copy_of_a_parameter_is_refused(step: TrainingStep, tmp_path: Path) -> None:
    """As where equal weights are merged: its updates would change what nothing reads."""
    path = tmp_path / "step.onnx"
    step.save(path)
    model = onnx.load(path)
    (weight,) = (one for one in model.graph.initializer if one.name == "norm.bias")
    model.graph.initializer.add().CopyFrom(weight)
    model.graph.initializer[-1].name = "copy"
    for node in model.graph.node:
        if not node.name.startswith("optimizer"):
            node.input[:] = ["copy" if name == "norm.bias" else name for name in node.input]
    onnx.save(model, path)
    with pytest.raises(ModelError, match=r"step\.onnx: the loss does not depend on 'norm\.bias' any more; expected"):
        TrainingSession(path)


def test_a_file_with_another_constant_is_refused(step: TrainingStep, tmp_path: Path) -> None:
    """It may be folded into others, and the evaluation model has one of its own."""
    path = tmp_path / "step.onnx"
    step.save(path)
    model = onnx.load(path)
    (weight,) = (one for one in model.graph.initializer if one.name == "frozen.bias")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) + np.float32(1), weight.name))
    onnx.save(model, path)
    with pytest.raises(ModelError, match=r"step\.onnx: 'frozen\.bias' has other values than the step was made with"):
        TrainingSession(path)


class Tied(nn.Module):
    """Two layers of one weight, and a constant that is NaN."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype)
        self.second.weight = self.first.weight
        self.register_buffer("unset", torch.full((2,), torch.nan, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_nan_can_be_loaded_again(dtype: torch.dtype, tmp_path: Path) -> None:
    module, x = Tied(dtype), torch.ones(3, 4, dtype=dtype)
    step = export_training_step(module, F.cross_entropy, (x, Y[:3]), torch.optim.SGD(module.parameters(), lr=0.1))
    session = TrainingSession(step)
    session.load_state_dict(module.state_dict())
    session.step(x * torch.nan, Y[:3])
    state = session.state_dict()
    assert all(np.isnan(array).all() for array in state.values())
    session.load_state_dict(state)
    session.save(tmp_path / "state.safetensors")
    session.load(tmp_path / "state.safetensors")


def test_steps_without_all_values_are_refused(step: TrainingStep) -> None:
    state = {name: array for name, array in step.optimizer_state.items() if name != "step"}
    with pytest.raises(ModelError, match="the step has no value for the input 'step'; expected one"):
        TrainingSession(dataclasses.replace(step, optimizer_state=state))
    parameters = {**step.parameters, "embed.weight": step.parameters["embed.weight"].astype(np.float64)}
    with pytest.raises(ArgumentError, match=r"'embed\.weight' is float64 of shape \(6, 4\); expected float32"):
        TrainingSession(dataclasses.replace(step, parameters=parameters))


def test_threads_share_a_session_and_none_loses_a_step_or_gets_the_loss_of_another(
    step: TrainingStep, gradient_step: TrainingStep
) -> None:
    count, threads = 40, 4
    session = TrainingSession(step)
    losses: list[list[float]] = [[] for _ in range(threads)]
    still = TrainingSession(gradient_step)
    x, y = batches(1, 3)[0]
    wanted = [still.step(x * size, y) for size in range(1, threads + 1)]

    def train(number: int) -> None:
        for _ in range(count):
            session.step(*DATA[number])
            losses[number].append(still.step(x * (number + 1), y))

    working = [threading.Thread(target=train, args=(number,)) for number in range(threads)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    assert session.step_count == int(session.ort_values["step"].numpy()) == count * threads
    assert losses == [[loss] * count for loss in wanted]


def test_what_other_threads_ask_for_is_of_whole_steps(step: TrainingStep, tmp_path: Path) -> None:
    """Checkpoints, states and rates that are read or set while another thread trains."""
    session, path, end = TrainingSession(step), tmp_path / "now.safetensors", threading.Event()
    session.save(path)
    found: list[int] = []

    def train() -> None:
        while not end.is_set():
            session.step(*DATA[0])

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(15):
            session.learning_rate = 0.0
            before, after = session.state_dict(), session.state_dict()
            assert all(np.array_equal(before[name], after[name]) for name, _ in Whole().named_parameters())
            session.evaluate(DATA[0][0])
            session.save(path)
            saved = safetensors.numpy.load_file(path)
            found.append(int(saved["step"]))
            with safetensors.safe_open(path, "np") as file:
                assert f'"step_count": {found[-1]}' in str(file.metadata())
            session.load(path)
    finally:
        end.set()
        thread.join()
    assert found == sorted(found)


@pytest.mark.parametrize("after", [False, True])
def test_a_handler_within_a_step_sees_it_done_or_not_begun(
    step: TrainingStep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: bool
) -> None:
    session, reference, run = TrainingSession(step), TrainingSession(step), TrainingSession._run
    for batch in DATA[: 1 + after]:
        reference.step(*batch)
    session.step(*DATA[0])
    errors: list[GradfuseError] = []

    def handle(*_: Any) -> None:
        assert session.step_count == 1 + after
        wanted, got = everything(reference), everything(session)
        assert all(np.array_equal(wanted[name], got[name]) for name in wanted)
        session.save(tmp_path / "now.safetensors")
        with pytest.raises(GradfuseError, match="step: is called within a step") as raised:
            session.step(*DATA[1])
        errors.append(raised.value)

    def interrupted(self: TrainingSession, *arguments: Any) -> None:
        if not after:
            signal.raise_signal(signal.SIGUSR1)
        run(self, *arguments)
        if after:
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(TrainingSession, "_run", interrupted)
    handler = signal.signal(signal.SIGUSR1, handle)
    try:
        session.step(*DATA[1])
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert errors and session.step_count == 2


def test_a_load_that_a_handler_interrupts_is_whole(
    step: TrainingStep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session, other, path = TrainingSession(step), TrainingSession(step), tmp_path / "now.safetensors"
    for batch in DATA[:3]:
        other.step(*batch)
    other.save(path)
    update, calls = onnxruntime.OrtValue.update_inplace, 0

    def interrupted(value: Any, array: Any) -> None:
        nonlocal calls
        update(value, array)
        calls += 1
        if calls == 5:
            raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime.OrtValue, "update_inplace", interrupted)
        with pytest.raises(TimeoutError):
            session.load(path)
    wanted, got = everything(other), everything(session)
    assert session.step_count == 3 and all(np.array_equal(wanted[name], got[name]) for name in wanted)
