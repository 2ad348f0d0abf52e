"""Artifacts of onnxruntime-training in stock onnxruntime: the files in `artifacts`, and files that are wrong."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from ort_training.runs import Run

import gradfuse
from gradfuse import ModelError, cli
from gradfuse.ort_training import checkpoint
from gradfuse.testing import assert_gradients_close

ARTIFACTS = Path(__file__).with_name("artifacts")
CASES = ["classifier", "convolution", "attention"]


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """A copy of the smallest artifacts."""
    return shutil.copytree(ARTIFACTS / "classifier", tmp_path / "artifacts")


@pytest.mark.parametrize("name", CASES)
def test_losses_and_parameters_are_those_of_onnxruntime_training(name: str) -> None:
    Run.load(ARTIFACTS / name).require_equal_training()


def test_training_goes_on_from_a_checkpoint_with_its_optimizer_state() -> None:
    Run.load(ARTIFACTS / "attention").require_equal_continuation()


def test_gradient_of_an_embedding_is_added_up_in_order() -> None:
    """With a reduction, onnxruntime's ScatterND loses addends where its threads meet."""
    for fuse in (False, True):
        operators = {node.op_type for node in gradfuse.to_stock(ARTIFACTS / "attention", fuse=fuse).model.graph.node}
        assert "ScatterElements" in operators and "ScatterND" not in operators


@pytest.mark.parametrize("name", CASES)
def test_evaluation_model_gives_what_the_module_gives(name: str) -> None:
    Run.load(ARTIFACTS / name).require_equal_evaluation()


def test_step_names_what_the_artifacts_have() -> None:
    step = gradfuse.to_stock(ARTIFACTS / "classifier", ARTIFACTS / "classifier" / "trained")
    assert (step.input_names, step.target_names) == (("input",), ("labels",))
    assert list(step.parameters) == ["0.weight", "2.weight", "2.bias"]
    assert list(step.constants) == ["0.bias"] and not step.buffers
    assert set(step.optimizer_state) == {f"{p}.{s}" for p in step.parameters for s in ("exp_avg", "exp_avg_sq")} | {
        "step"
    }
    assert step.optimizer_state["step"] == 4
    assert step.report is not None and [f.op for f in step.report.fusions] == ["CrossEntropyLossGrad"]
    buffers = gradfuse.to_stock(ARTIFACTS / "convolution", fuse=False).buffers
    assert list(buffers) == ["norm.running_mean", "norm.running_var"]


def test_training_model_is_fused_where_it_is() -> None:
    result = gradfuse.fuse(ARTIFACTS / "convolution" / "training_model.onnx", policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["CrossEntropyLossGrad"]


def test_gradient_of_dropout_is_of_the_elements_that_were_kept(tmp_path: Path) -> None:
    folder = shutil.copytree(ARTIFACTS / "dropout", tmp_path / "artifacts")
    (folder / "optimizer_model.onnx").unlink()
    step = gradfuse.to_stock(folder)
    onnx.checker.check_model(step.model, full_check=True)
    session = gradfuse.TrainingSession(step)
    session.load_state_dict({"0.weight": np.zeros((4, 6), np.float32), "0.bias": np.ones(4, np.float32)})
    # Outputs are 0 or 1 / 0.6. The loss is their mean square, and half the gradient of a bias its column's part.
    loss = session.step(np.ones((50, 6), np.float32), np.zeros((50, 4), np.float32))
    kept = round(loss * 200 * 0.36)
    assert 80 < kept < 160
    for actual, exact in ((loss, kept / 0.36 / 200), (session.gradients["0.bias"].sum(), 2 * kept / 0.36 / 200)):
        assert_gradients_close(np.float32(actual), np.float32(exact), np.float64(exact), np.float32)


def test_without_an_optimizer_the_step_ends_at_the_gradients(artifacts: Path) -> None:
    (artifacts / "optimizer_model.onnx").unlink()
    (artifacts / "eval_model.onnx").unlink()
    step = gradfuse.to_stock(artifacts)
    assert not step.optimizer_state and not step.hyperparameters and step.evaluation_model is None
    session = gradfuse.TrainingSession(step)
    run = Run.load(artifacts)
    loss = session.step(run.arrays["input.0"], run.arrays["target.0"])
    assert_gradients_close(np.float32(loss), run.losses("native")[0], run.losses("exact")[0], np.float32)
    assert set(session.gradients) == set(step.parameters)


def test_example_of_the_page_runs(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "onnxruntime-training.md"
    example = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[0]
    monkeypatch.chdir(artifacts.parent)
    run = Run.load(artifacts)
    values = {"x": run.arrays["input.0"], "labels": run.arrays["target.0"]}
    exec(example, values)
    assert_gradients_close(np.float32(values["loss"]), run.losses("native")[0], run.losses("exact")[0], np.float32)
    assert (artifacts.parent / "trained.safetensors").is_file()


def test_command_writes_a_step_that_trains(artifacts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in list(artifacts.iterdir()):
        path.rename(path.with_name(f"my_{path.name}"))
    target = artifacts / "step.onnx"
    assert cli.run(["to-stock", str(artifacts), str(target)]) == 0
    assert "inputs input; targets labels" in capsys.readouterr().out
    run = Run.load(ARTIFACTS / "classifier")
    _, losses = run.train(gradfuse.TrainingStep.load(target))
    assert_gradients_close(losses, run.losses("native"), run.losses("exact"), np.float32)


def test_checkpoint_beyond_two_gigabytes_has_its_tensors_in_a_file_beside_it(tmp_path: Path) -> None:
    import flatbuffers

    builder = flatbuffers.Builder()

    def table(*fields: tuple[Callable[[int, int, int], None], int, int]) -> int:
        builder.StartObject(7)
        for number, (prepend, value, default) in enumerate(fields):
            prepend(number, value, default)
        return int(builder.EndObject())

    def vector(values: list[int], size: int, prepend: Callable[[int], None]) -> int:
        builder.StartVector(size, len(values), size)
        for value in reversed(values):
            prepend(value)
        return int(builder.EndVector())

    offset, absent = builder.PrependUOffsetTRelativeSlot, (builder.PrependUOffsetTRelativeSlot, 0, 0)
    name, dims = builder.CreateString("weight"), vector([2, 3], 8, builder.PrependInt64)
    tensor = table(
        (offset, name, 0),
        absent,
        (offset, dims, 0),
        (builder.PrependInt32Slot, int(onnx.TensorProto.FLOAT), 0),
        absent,
        absent,
        (builder.PrependInt64Slot, 8, -1),
    )
    parameters = vector([tensor], 4, builder.PrependUOffsetTRelative)
    module = table((offset, parameters, 0))
    builder.Finish(table((builder.PrependInt32Slot, 1, 0), (offset, module, 0)), file_identifier=b"ODTC")
    path = tmp_path / "checkpoint"
    path.write_bytes(bytes(builder.Output()))

    with pytest.raises(ModelError, match=r"checkpoint\.data: cannot read the checkpoint's data: No such file"):
        checkpoint.load(path)
    np.arange(8, dtype=np.float32).tofile(tmp_path / "checkpoint.data")
    loaded = checkpoint.load(path)
    np.testing.assert_array_equal(loaded.trainable["weight"], np.array([[2, 3, 4], [5, 6, 7]], np.float32))
    np.arange(7, dtype=np.float32).tofile(tmp_path / "checkpoint.data")
    with pytest.raises(ModelError, match=r"is truncated or damaged: 'weight' has 5 elements and shape \(2, 3\)"):
        checkpoint.load(path)


def _edited(name: str, edit: Callable[[onnx.ModelProto], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        model = onnx.load(folder / name)
        edit(model)
        onnx.save(model, folder / name)

    return damage


def _set_op_type(op_type: str, to: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        (node,) = (node for node in model.graph.node if node.op_type == op_type)
        node.op_type = to

    return edit


def _resize(model: onnx.ModelProto, name: str) -> None:
    (value,) = (value for value in model.graph.input if value.name == name)
    value.type.tensor_type.shape.dim[0].dim_value = 5


def _rename_input(name: str, to: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = [to if value == name else value for value in node.input]
        for value in model.graph.input:
            value.name = to if value.name == name else value.name

    return edit


def _checkpoint(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "checkpoint"
        path.write_bytes(change(path.read_bytes()))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "artifacts: is no folder; expected the one that generate_artifacts"),
        (
            lambda folder: (folder / "training_model.onnx").unlink(),
            "the training models are none; expected one <prefix>training_model.onnx",
        ),
        (lambda folder: (folder / "checkpoint").unlink(), "checkpoint: cannot read the checkpoint: No such file"),
        (_checkpoint(lambda content: b"not a checkpoint"), "checkpoint: is not a checkpoint of onnxruntime-training"),
        (_checkpoint(lambda content: content[:200]), "checkpoint: is truncated or damaged"),
        (
            lambda folder: shutil.copy(folder / "nominal_checkpoint", folder / "checkpoint"),
            "is a nominal checkpoint, which has no values; expected the full one",
        ),
        (
            lambda folder: shutil.copy(ARTIFACTS / "convolution" / "checkpoint", folder / "checkpoint"),
            "does not fit .*: only one has the parameter '0.weight'",
        ),
        (
            _edited("training_model.onnx", lambda model: _resize(model, "2.bias")),
            r"does not fit .*: '2.bias' has shape \(4,\); expected \[5\]",
        ),
        (
            _edited("training_model.onnx", _set_op_type("ReluGrad", "EluGrad")),
            "has operators of onnxruntime-training that gradfuse cannot replace: EluGrad",
        ),
        (
            _edited("optimizer_model.onnx", _set_op_type("AdamWOptimizer", "LambOptimizer")),
            "has the operator LambOptimizer; expected onnxblock's AdamW or SGD",
        ),
        (
            _edited("training_model.onnx", _rename_input("input", "step")),
            "has a value 'step', the name that another one of a training step has",
        ),
        (
            lambda folder: shutil.copy(folder / "eval_model.onnx", folder / "training_model.onnx"),
            "has no gradient accumulators; expected a model that generate_artifacts wrote",
        ),
    ],
)
def test_wrong_artifacts_are_refused_in_one_line_and_nothing_is_written(
    damage: Callable[[Path], object],
    message: str,
    artifacts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(artifacts)
    with pytest.raises(ModelError, match=message):
        gradfuse.to_stock(artifacts)
    before = set(tmp_path.iterdir())
    assert cli.run(["to-stock", str(artifacts), str(tmp_path / "step.onnx")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert set(tmp_path.iterdir()) == before
