"""Steps whose inputs have no default values: the values are in a file beside them, and both are written or neither."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
import small_models
import torch
import torch.nn.functional as F
from command_runs import Run
from training.models import SHAPES, Mlp, Whole, batches, groups

from gradfuse import (
    ArgumentError,
    GradfuseError,
    ModelError,
    TrainingSession,
    TrainingStep,
    build_training_step,
    export_training_step,
    optimizers,
)
from gradfuse.training.step import METADATA_KEY

DATA = batches(12, 4)


@pytest.fixture(scope="module")
def step() -> TrainingStep:
    torch.manual_seed(0)
    module = Whole()
    optimizer = torch.optim.AdamW(groups(module), lr=0.01)
    return export_training_step(module, F.cross_entropy, DATA[0], optimizer, dynamic_shapes=SHAPES)


@pytest.fixture
def saved(step: TrainingStep, tmp_path: Path) -> Path:
    step.save(tmp_path / "step.onnx", defaults=False)
    return tmp_path / "step.onnx"


def values_of(step: TrainingStep) -> dict[str, Any]:
    return {**step.parameters, **step.buffers, **step.optimizer_state, **step.hyperparameters}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], strict=True)


def test_inputs_are_plain_and_their_values_beside_the_step(step: TrainingStep, saved: Path) -> None:
    assert sorted(os.listdir(saved.parent)) == ["step.eval.onnx", "step.onnx", "step.safetensors"]
    for path in (saved, saved.with_name("step.eval.onnx")):
        graph = onnx.load(path).graph
        assert not {value.name for value in graph.input} & {tensor.name for tensor in graph.initializer}
    stored = safetensors.numpy.load_file(saved.with_suffix(".safetensors"))
    fed = {value.name for value in onnx.load(saved).graph.input} - {*step.input_names, *step.target_names}
    assert set(stored) == fed
    assert_equal(stored, values_of(step))


def test_any_onnxruntime_trains_it_from_the_values(step: TrainingStep, saved: Path) -> None:
    """Fed with what is in the file, and then with what the step before gave; frozen parameters are in the model."""
    feeds = safetensors.numpy.load_file(saved.with_suffix(".safetensors"))
    session = onnxruntime.InferenceSession(saved, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    options = onnxruntime.SessionOptions()
    ours = TrainingSession(step, session_options=options)
    for x, y in DATA:
        results = dict(zip(names, session.run(names, feeds | {"x": x.numpy(), "target": y.numpy()}), strict=True))
        assert results.pop("loss") == ours.step(x, y)
        feeds |= {name.removesuffix(".updated"): array for name, array in results.items()}
    assert_equal(
        {name: feeds[name] for name in step.parameters}, {n: ours.ort_values[n].numpy() for n in step.parameters}
    )


def test_it_trains_as_the_step_with_defaults_does(step: TrainingStep, saved: Path) -> None:
    one, other = TrainingSession(saved), TrainingSession(step)
    assert [one.step(*batch) for batch in DATA] == [other.step(*batch) for batch in DATA]
    assert_equal(one.state_dict(), other.state_dict())
    np.testing.assert_array_equal(one.evaluate(DATA[0][0]), other.evaluate(DATA[0][0]))
    # Without the optimizer's state a checkpoint begins as the values do.
    one.save(saved.with_name("model.safetensors"), optimizer=False)
    one.load(saved.with_name("model.safetensors"))
    assert_equal({n: one.ort_values[n].numpy() for n in step.optimizer_state}, dict(step.optimizer_state))


def test_what_is_loaded_is_what_was_saved(step: TrainingStep, saved: Path, tmp_path: Path) -> None:
    loaded = TrainingStep.load(saved)
    for field in ("parameters", "buffers", "optimizer_state", "hyperparameters", "constants"):
        assert_equal(getattr(loaded, field), getattr(step, field))
    assert loaded.state_dict_names == step.state_dict_names
    step.save(tmp_path / "direct.onnx")
    loaded.save(tmp_path / "again.onnx")
    assert_equal(*(values_of(TrainingStep.load(tmp_path / f"{name}.onnx")) for name in ("direct", "again")))
    # The path may be a link to the file.
    (tmp_path / "elsewhere").mkdir()
    os.symlink(saved, tmp_path / "elsewhere" / "link.onnx")
    assert_equal(values_of(TrainingStep.load(tmp_path / "elsewhere" / "link.onnx")), values_of(step))


def test_a_fused_file_has_the_values_too(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Mlp()
    data = batches(5, 3)
    optimizer = torch.optim.Adam(module.parameters())
    plain = export_training_step(module, F.cross_entropy, data[0], optimizer, fuse=False)
    plain.save(tmp_path / "step.onnx", defaults=False)
    code, out, _ = run("fuse", tmp_path / "step.onnx", tmp_path / "fused.onnx")
    assert code == 0 and "ApplyAdamW" in out
    one, other = TrainingSession(tmp_path / "fused.onnx"), TrainingSession(tmp_path / "step.onnx")
    for x, y in data:
        assert one.step(x, y) == pytest.approx(other.step(x, y), rel=1e-5)


def test_a_batch_may_have_a_default_too(step: TrainingStep, tmp_path: Path) -> None:
    """Its input is plain then, and a file with defaults has it again."""
    model = onnx.ModelProto()
    model.CopyFrom(step.model)
    model.graph.initializer.append(onnx.numpy_helper.from_array(DATA[0][0].numpy(), "x"))
    given = dataclasses.replace(step, model=model)
    given.save(tmp_path / "step.onnx", defaults=False)
    assert not {tensor.name for tensor in onnx.load(tmp_path / "step.onnx").graph.initializer} & {"x"}
    TrainingStep.load(tmp_path / "step.onnx").save(tmp_path / "again.onnx")
    (tensor,) = (t for t in onnx.load(tmp_path / "again.onnx").graph.initializer if t.name == "x")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), DATA[0][0].numpy())


def changed(path: Path, **change: Any) -> None:
    stored = safetensors.numpy.load_file(path)
    stored |= {name.replace("__", "."): array for name, array in change.items()}
    safetensors.numpy.save_file({name: array for name, array in stored.items() if array is not None}, path)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (Path.unlink, r"cannot read the file: .*step\.safetensors"),
        (as_pipe, r"is no file; expected the values of .*step\.onnx"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cannot read the file"),
        (lambda path: changed(path, step=None), r"'step' is missing; expected all values of .*step\.onnx"),
        (
            lambda path: changed(path, norm__bias=np.ones(5, np.float32)),
            r"'norm\.bias' is FLOAT\[5\]; expected FLOAT\[6\]",
        ),
        (lambda path: changed(path, step=np.array(0.0)), r"'step' is DOUBLE\[\]; expected INT64\[\]"),
    ],
)
def test_values_that_do_not_fit_are_refused_in_one_line(
    saved: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(saved.with_suffix(".safetensors"))
    with pytest.raises(ModelError, match=rf"^\S+step\.safetensors: {message}") as error:
        TrainingSession(saved)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [3, "../step.safetensors", "/step.safetensors"])
def test_values_are_in_the_folder_of_the_step(saved: Path, name: Any) -> None:
    model = onnx.load(saved)
    (stored,) = (prop for prop in model.metadata_props if prop.key == METADATA_KEY)
    stored.value = json.dumps({**json.loads(stored.value), "values": name})
    onnx.save(model, saved)
    with pytest.raises(ModelError, match=r"step\.onnx: is not a training step saved by gradfuse"):
        TrainingSession(saved)


def test_without_safetensors_nothing_is_written(
    step: TrainingStep, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (lambda: step.save(tmp_path / "other.onnx", defaults=False), lambda: TrainingStep.load(saved)):
        with pytest.raises(GradfuseError, match=r"^TrainingStep: safetensors is not installed; expected what gradfuse"):
            call()
    assert sorted(os.listdir(tmp_path)) == before


def test_nothing_else_is_replaced(step: TrainingStep, tmp_path: Path) -> None:
    path, other = tmp_path / "step.onnx", tmp_path / "step.safetensors"
    step.save(path)
    TrainingSession(path).save(other)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ModelError, match=r"step\.safetensors: exists and does not belong to a step at"):
        step.save(path, defaults=False)
    with pytest.raises(ModelError, match=r"step\.safetensors: is where its values belong; expected another ending"):
        step.save(other, defaults=False, force=True)
    with pytest.raises(ModelError, match=r"step\.safetensors: is .*, which the input is read from"):
        step.save(path, defaults=False, inputs=[str(other)], force=True)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    step.save(path, defaults=False, force=True)
    step.save(path, defaults=False)
    session = TrainingSession(path)
    with pytest.raises(ModelError, match=r"step\.safetensors: is .*, which the input is read from"):
        session.save(other)
    assert_equal(values_of(TrainingStep.load(path)), values_of(step))


@pytest.mark.parametrize("had", [False, True])
def test_step_and_values_are_both_written_or_neither(
    step: TrainingStep, tmp_path: Path, had: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step.onnx"
    rates = {name: np.array(0.5, np.float32) for name in step.hyperparameters}
    if had:
        dataclasses.replace(step, hyperparameters=rates, evaluation_model=None).save(path, defaults=False)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}

    def full(*_: Any) -> None:
        # The values are in their place by now.
        assert os.path.exists(tmp_path / "step.safetensors")
        raise OSError("full")

    with monkeypatch.context() as patched, pytest.raises(ModelError, match=r"step\.onnx: cannot write the model: full"):
        patched.setattr(os, "replace", _only_first(os.replace, full))
        step.save(path, defaults=False)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    step.save(path, defaults=False)
    assert_equal(values_of(TrainingStep.load(path)), values_of(step))


def _only_first(real: Callable[..., None], first: Callable[..., None]) -> Callable[..., None]:
    """Return a function that does the first at its first call, and then the real thing."""
    calls: list[Any] = []

    def call(*arguments: Any) -> None:
        calls.append(arguments)
        (first if len(calls) == 1 else real)(*arguments)

    return call


def test_artifacts_become_such_steps(run: Run, tmp_path: Path) -> None:
    artifacts = Path(__file__).parents[1] / "plugin" / "artifacts" / "classifier"
    for options in ([], ["--no-defaults"]):
        code, _, error = run("to-stock", artifacts, tmp_path / f"step{len(options)}.onnx", *options)
        assert code == 0, error
    one, other = (TrainingStep.load(tmp_path / f"step{index}.onnx") for index in (0, 1))
    assert (tmp_path / "step1.safetensors").exists() and not (tmp_path / "step0.safetensors").exists()
    assert_equal(values_of(one), values_of(other))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_of_16_bits_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    x, y = batches(1, 3)[0]
    step = export_training_step(Mlp().to(dtype), F.cross_entropy, (x.to(dtype), y), fuse=False)
    step.save(tmp_path / "step.onnx", defaults=False)
    assert_equal(values_of(TrainingStep.load(tmp_path / "step.onnx")), values_of(step))


def test_the_command_writes_such_steps(run: Run, tmp_path: Path) -> None:
    onnx.save(small_models.forward(), tmp_path / "model.onnx")
    options = ["--loss", "mse", "--optimizer", "sgd", "--lr", 0.1, "--no-defaults", "--no-fuse", "--no-float64"]
    code, _, error = run("training-step", tmp_path / "model.onnx", tmp_path / "step.onnx", *options)
    assert code == 0, error
    assert {"step.onnx", "step.safetensors"} <= set(os.listdir(tmp_path))
    assert "learning_rate" in safetensors.numpy.load_file(tmp_path / "step.safetensors")
    step = TrainingStep.load(tmp_path / "step.onnx")
    assert step.parameters
    assert onnx.TensorProto.DOUBLE not in {
        attribute.i for node in step.model.graph.node for attribute in node.attribute if node.op_type == "Cast"
    }
    code, _, error = run(
        "training-step", tmp_path / "model.onnx", tmp_path / "other.onnx", *options[:-2], "--no-float64"
    )
    assert (code, error) == (2, "gradfuse: --no-float64 is given without --no-fuse; expected both or neither\n")
    with pytest.raises(ArgumentError, match="float64 is False; expected fuse=False with it"):
        build_training_step(tmp_path / "model.onnx", "mse", optimizer=optimizers.SGD(lr=0.1), float64=False)
