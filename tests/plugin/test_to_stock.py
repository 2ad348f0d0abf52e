"""Artifacts of onnxruntime-training in stock onnxruntime: the files in `artifacts`, and files that are wrong."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ort_training.runs import Run

import gradfuse
from gradfuse import ArgumentError, ModelError, cli
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
    for fuse, added_up in ((False, "ScatterElements"), (True, "EmbeddingDenseBackward")):
        operators = {node.op_type for node in gradfuse.to_stock(ARTIFACTS / "attention", fuse=fuse).model.graph.node}
        assert added_up in operators and "ScatterND" not in operators


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
    operators = Counter(fusion.op for fusion in result.report.fusions)
    convolutions = {"ConvolutionBackward": 2, "BatchNormBackward": 1, "MaxPoolBackward": 1}
    assert operators == Counter(CrossEntropyLossGrad=1, **convolutions)


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


Tensor = tuple[str, list[int], int, bytes | int]
"""Name, sizes, ONNX type, and the bytes or where they begin in the data file."""

WEIGHT: Tensor = ("weight", [2, 3], onnx.TensorProto.FLOAT, np.arange(6, dtype=np.float32).tobytes())


def write_checkpoint(
    path: Path,
    trainable: Sequence[Tensor] = (WEIGHT,),
    frozen: Sequence[Tensor] = (),
    *,
    steps: int = 0,
    learning_rate: float = 0.5,
) -> None:
    import flatbuffers

    builder = flatbuffers.Builder()
    offset = builder.PrependUOffsetTRelativeSlot

    def table(*fields: tuple[int, Callable[[int, Any, Any], None], Any, Any]) -> int:
        builder.StartObject(7)
        for number, prepend, value, default in fields:
            prepend(number, value, default)
        return int(builder.EndObject())

    def vector(values: Sequence[int], size: int, prepend: Callable[[int], None]) -> int:
        builder.StartVector(size, len(values), size)
        for value in reversed(values):
            prepend(value)
        return int(builder.EndVector())

    def tensors(given: Sequence[Tensor]) -> int:
        tables = []
        for name, sizes, dtype, content in given:
            fields = [(0, offset, builder.CreateString(name), 0)]
            fields.append((2, offset, vector(sizes, 8, builder.PrependInt64), 0))
            fields.append((3, builder.PrependInt32Slot, dtype, 0))
            if isinstance(content, bytes):
                fields.append((4, offset, builder.CreateByteVector(content), 0))
            else:
                fields.append((6, builder.PrependInt64Slot, content, -1))
            tables.append(table(*fields))
        return vector(tables, 4, builder.PrependUOffsetTRelative)

    module = table((0, offset, tensors(trainable), 0), (1, offset, tensors(frozen), 0))
    group = table((1, builder.PrependInt64Slot, steps, 0), (2, builder.PrependFloat32Slot, learning_rate, 0.0))
    groups = vector([group], 4, builder.PrependUOffsetTRelative)
    root = table((0, builder.PrependInt32Slot, 1, 0), (1, offset, module, 0), (2, offset, groups, 0))
    builder.Finish(root, file_identifier=b"ODTC")
    path.write_bytes(bytes(builder.Output()))


def test_checkpoint_beyond_two_gigabytes_has_its_tensors_in_a_file_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write_checkpoint(path, [(*WEIGHT[:3], 8)])
    with pytest.raises(ModelError, match=r"checkpoint\.data: cannot read the checkpoint's data: No such file"):
        checkpoint.load(path)
    np.arange(8, dtype=np.float32).tofile(tmp_path / "checkpoint.data")
    loaded = checkpoint.load(path)
    np.testing.assert_array_equal(loaded.trainable["weight"], np.array([[2, 3, 4], [5, 6, 7]], np.float32))
    np.arange(7, dtype=np.float32).tofile(tmp_path / "checkpoint.data")
    with pytest.raises(ModelError, match=r"is truncated or damaged: 'weight' has 5 elements and shape \(2, 3\)"):
        checkpoint.load(path)
    # Nothing of the size that a file merely claims is allocated.
    write_checkpoint(path, [("weight", [2**40], onnx.TensorProto.FLOAT, 8)])
    with pytest.raises(ModelError, match=r"'weight' has 5 elements and shape \(1099511627776,\)"):
        checkpoint.load(path)
    (tmp_path / "checkpoint.data").unlink()
    os.mkfifo(tmp_path / "checkpoint.data")
    with pytest.raises(ModelError, match=r"checkpoint\.data: .*is no file; expected one"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"trainable": [("w", [2, 3], 1, bytes(20))]}, r"'w' has 5 elements and shape \(2, 3\); expected 6"),
        ({"trainable": [("w", [2, 3], 1, bytes(28))]}, r"'w' has 7 elements and shape \(2, 3\); expected 6"),
        ({"trainable": [("w", [2, 3], 1, bytes(23))]}, "is truncated or damaged"),
        ({"trainable": [("w", [-2, -3], 1, bytes(24))]}, r"'w' has shape \(-2, -3\); expected sizes from 0 on"),
        ({"trainable": [("w", [2**33, 2**33], 1, bytes(24))]}, r"'w' has 6 elements and shape \(8589934592, 8589"),
        ({"trainable": [("w", [6], 99, bytes(24))]}, "is truncated or damaged"),
        ({"trainable": [("w", [6], 8, bytes(24))]}, "is truncated or damaged"),
        ({"trainable": [WEIGHT, WEIGHT]}, "'weight' is there twice; expected different names"),
        ({"frozen": [WEIGHT]}, "'weight' is a trainable parameter and a frozen one; expected one of them"),
        ({"steps": -1}, "the optimizer has done -1 steps; expected 0 or more"),
        ({"learning_rate": float("nan")}, "the learning rate is nan; expected a finite number from 0 on"),
        ({"learning_rate": -0.5}, r"the learning rate is -0\.5; expected a finite number from 0 on"),
    ],
)
def test_checkpoints_that_contradict_themselves_are_refused(
    content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    write_checkpoint(path, **content)
    with pytest.raises(ModelError, match=rf"checkpoint: is truncated or damaged: .*{message}|{message}") as error:
        checkpoint.load(path)
    assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_checkpoints_are_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever bytes change, and wherever the file ends."""
    content = bytearray((ARTIFACTS / "classifier" / data.draw(st.sampled_from(["checkpoint", "trained"]))).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) // 4 - 1)) * 4
        content[at : at + 4] = data.draw(
            st.binary(min_size=4, max_size=4)
            | st.sampled_from([b"\xff" * 4, bytes(4), b"\0\0\0\x80", b"\xff\xff\xff\x7f"])
        )
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        loaded = checkpoint.load(path)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert loaded.steps >= 0 and not set(loaded.trainable) & set(loaded.frozen)


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


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def _first(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    nodes: list[onnx.NodeProto] = [node for node in model.graph.node if node.op_type == op_type]
    return nodes[0]


def _retype(model: onnx.ModelProto, name: str) -> None:
    (value,) = (value for value in model.graph.input if value.name == name)
    value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE


def _drop_outputs(model: onnx.ModelProto) -> None:
    del model.graph.output[:]


def _set_attribute(op_type: str, name: str, value: Any) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        node = _first(model, op_type)
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])

    return edit


def _twice(model: onnx.ModelProto) -> None:
    second = onnx.NodeProto.FromString(_first(model, "AdamWOptimizer").SerializeToString())
    second.name, second.output[0] = "second", "second"
    model.graph.node.append(second)


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
        (lambda folder: (folder / "training_model.onnx").write_bytes(b""), "training_model.onnx: is not an ONNX model"),
        (_instead("eval_model.onnx", Path.mkdir), "eval_model.onnx: is a folder; expected an ONNX file"),
        (_instead("optimizer_model.onnx", os.mkfifo), "optimizer_model.onnx: .*; expected an ONNX file"),
        (_instead("checkpoint", os.mkfifo), "checkpoint: cannot read the checkpoint: it is no file; expected one"),
        (
            lambda folder: shutil.copy(ARTIFACTS / "convolution" / "eval_model.onnx", folder / "eval_model.onnx"),
            r"eval_model.onnx: does not fit .*training_model.onnx: 'input' has shape .*; expected \[batch,6\]",
        ),
        (
            _edited("training_model.onnx", lambda model: _retype(model, "2.bias")),
            "does not fit .*: '2.bias' is FLOAT; expected DOUBLE",
        ),
        (
            _edited("training_model.onnx", lambda model: _first(model, "InPlaceAccumulatorV2").input.pop()),
            r"InPlaceAccumulatorV2 \(GradientAccumulator\d+\) takes or gives other values",
        ),
        (
            _edited("training_model.onnx", _drop_outputs),
            r"InPlaceAccumulatorV2 \(GradientAccumulator\d+\) takes or gives other values",
        ),
        (
            _edited("training_model.onnx", _set_attribute("SoftmaxCrossEntropyLossGrad", "reduction", 3)),
            "cannot replace: SoftmaxCrossEntropyLossGrad",
        ),
        (
            _edited("optimizer_model.onnx", _set_attribute("AdamWOptimizer", "alpha", 1.5)),
            r"AdamWOptimizer has alpha 1\.5; expected a finite number from 0 on, and below 1",
        ),
        (
            _edited("optimizer_model.onnx", _set_attribute("AdamWOptimizer", "epsilon", float("nan"))),
            "AdamWOptimizer has epsilon nan; expected a finite number from 0 on",
        ),
        (
            _edited("optimizer_model.onnx", _set_attribute("InplaceClipGradNorm", "max_norm", "much")),
            "InplaceClipGradNorm has max_norm much; expected a finite number from 0 on",
        ),
        (
            _edited("optimizer_model.onnx", _set_attribute("AdamWOptimizer", "adam_mode", 2)),
            r"AdamWOptimizer has adam_mode and correct_bias \[2, 1\]; expected 0 and 1, or 1 and either",
        ),
        (
            _edited("optimizer_model.onnx", _twice),
            "has TransformersAdamW and TransformersAdamW; expected one AdamW or SGD of onnxblock",
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


@pytest.mark.parametrize("path", [None, 3, b"artifacts", []])
def test_paths_that_are_none_are_refused(path: Any, artifacts: Path) -> None:
    with pytest.raises(ArgumentError, match=r"to_stock: artifacts_dir is \w+; expected a path"):
        gradfuse.to_stock(path)
    if path is not None:
        with pytest.raises(ArgumentError, match=r"to_stock: checkpoint is \w+; expected a path"):
            gradfuse.to_stock(artifacts, path)


def test_state_of_the_optimizer_is_that_of_all_parameters(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checkpoint.load(artifacts / "trained")
    where = r"optimizer_model\.onnx: the checkpoint's state of the optimizer"
    lacking = {name: states for name, states in whole.momentums.items() if name != "2.bias"}
    other = {**whole.momentums, "other": whole.momentums["2.bias"]}
    reshaped = {**whole.momentums, "2.bias": {**whole.momentums["2.bias"], "momentum1": np.zeros(5, np.float32)}}
    for momentums, message in (
        (lacking, r"lacks '2\.bias\.exp_avg'; expected that of all parameters"),
        (other, "has the parameter 'other'; expected those of the model"),
        (reshaped, r"has momentum1 of '2\.bias' as float32 of shape \(5,\); expected float32 of shape \(4,\)"),
    ):
        saved = dataclasses.replace(whole, momentums=momentums)
        monkeypatch.setattr(checkpoint, "load", lambda path, saved=saved: saved)
        with pytest.raises(ModelError, match=f"{where} {message}"):
            gradfuse.to_stock(artifacts)


@pytest.mark.parametrize(
    "name", ["training_model.onnx", "optimizer_model.onnx", "eval_model.onnx", "checkpoint", "link"]
)
def test_command_overwrites_no_artifact(name: str, artifacts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (artifacts / "link").symlink_to("checkpoint")
    before = {path.name: path.read_bytes() for path in artifacts.iterdir()}
    assert cli.run(["to-stock", str(artifacts), str(artifacts / name)]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "which the input is read from" in errors
    assert {path.name: path.read_bytes() for path in artifacts.iterdir()} == before


def test_command_writes_to_the_same_place_again_but_over_no_other_evaluation_model(
    artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "step.onnx"
    (tmp_path / "step.eval.onnx").write_text("precious")
    command = ["to-stock", str(artifacts), str(target)]
    assert cli.run(command) == 2
    assert "step.eval.onnx: exists and does not belong to a step at" in capsys.readouterr().err
    assert not target.exists() and (tmp_path / "step.eval.onnx").read_text() == "precious"
    assert cli.run([*command, "--force"]) == cli.run(command) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifacts", "step.eval.onnx", "step.onnx"]
