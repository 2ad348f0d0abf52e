"""`gradfuse training-step` and `gradfuse ops --differentiable`: what they write, and one line for every bad input."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from command_runs import Run

from gradfuse import TrainingSession
from gradfuse.differentiation.coverage import differentiable

MODEL = """<ir_version: 10, opset_import: ["": 18]>
net (float[N, 3] x) => (float[N, 4] y, int64[N] label)
    <float[3, 4] "first.weight" = {1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6},
     float[4] "first.bias" = {1, 0, 0, 1}, int64[1] k = {1}> {
    a = MatMul(x, "first.weight")
    b = Add(a, "first.bias")
    y = Relu(b)
    label = ArgMax <axis = 1, keepdims = 0> (y)
}"""


def saved(path: Path, change: Callable[[onnx.ModelProto], None] = lambda model: None) -> Path:
    model = onnx.parser.parse_model(MODEL)
    change(model)
    onnx.save(model, path)
    return path


def test_a_step_is_written_and_trains(run: Run, tmp_path: Path) -> None:
    source, target = saved(tmp_path / "in.onnx"), tmp_path / "step.onnx"
    options = [
        "--loss",
        "cross_entropy",
        "--optimizer",
        "adamw",
        "--lr",
        "1e-2",
        "--weight-decay",
        0,
        "--frozen",
        "*.bias",
    ]
    code, output, errors = run("training-step", source, target, *options)
    assert (code, errors) == (0, "")
    assert "parameters first.weight\ninputs x; targets target\n" in output
    session = TrainingSession(target)
    x, target_classes = np.eye(3, dtype=np.float32), np.array([0, 1, 2])
    losses = [session.step(x, target_classes) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_without_an_optimizer_it_gives_gradients(run: Run, tmp_path: Path) -> None:
    source, target = saved(tmp_path / "in.onnx"), tmp_path / "step.onnx"
    assert run("training-step", source, target, "--loss", "mse", "--no-fuse")[0] == 0
    outputs = [value.name for value in onnx.load(target).graph.output]
    assert outputs == ["loss", "first.weight.grad", "first.bias.grad"]


def _with_a_cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def _with_an_unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[2].op_type, model.graph.node[2].domain, model.graph.node[2].name = "Odd", "their.ops", "here"
    model.opset_import.append(onnx.helper.make_opsetid("their.ops", 1))


def _with_quantised_activations(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "s"))
    relu = model.graph.node[2]
    relu.input[0] = "dq"
    ahead = onnx.helper.make_node("QuantizeLinear", ["b", "s"], ["q"], name="rounded")
    behind = onnx.helper.make_node("DequantizeLinear", ["q", "s"], ["dq"])
    nodes = [*model.graph.node[:2], ahead, behind, *model.graph.node[2:]]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


WITH_LOSS = ["--loss", "cross_entropy"]
SGD = ["--optimizer", "sgd", "--lr", "0.1"]
BAD: dict[str, tuple[list[str], Callable[[onnx.ModelProto], None] | None, str]] = {
    "no such loss": (["--loss", "entropy"], None, "loss is 'entropy'; expected one of cross_entropy"),
    "a rank too low": (["--loss", "ctc"], None, "the output 'y' has shape .*; CTCLoss expected at least 3 dimensions"),
    "no scalar": ([], None, "loss is None and 0 outputs are scalars; expected one, or a loss"),
    "integers": ([*WITH_LOSS, "--trainable", "k"], None, "trainable has 'k', which is INT64; expected float"),
    "nothing matches": ([*WITH_LOSS, "--trainable", "second.*"], None, "'second.*', which matches nothing"),
    "nothing frozen": ([*WITH_LOSS, "--frozen", "second.*"], None, "frozen has 'second.*', which matches nothing"),
    "nothing left": ([*WITH_LOSS, "--frozen", "*"], None, "no float initializer is left to train"),
    "an unknown operator": (
        WITH_LOSS,
        _with_an_unknown_operator,
        r"their.ops::Odd \(node 'here'\): no gradient rule for this operator of domain 'their.ops'; "
        "the gradient of 'b' depends on it",
    ),
    "rounding": (
        WITH_LOSS,
        _with_quantised_activations,
        r"QuantizeLinear \(node 'rounded'\): rounding to integers has no derivative .*; the gradient of 'b'",
    ),
    "a cycle": (WITH_LOSS, _with_a_cycle, "is not a valid ONNX model"),
    "no optimizer": ([*WITH_LOSS, "--lr", "1"], None, "--lr is given without --optimizer"),
    "no rate": ([*WITH_LOSS, "--optimizer", "sgd"], None, "--lr is missing"),
    "a negative rate": ([*WITH_LOSS, "--optimizer", "adam", "--lr", "-1"], None, "Adam: lr is -1.0; expected"),
    "another's option": ([*WITH_LOSS, "--optimizer", "adam", "--momentum", "1"], None, "--momentum is given with"),
    "no pair": ([*WITH_LOSS, "--tie", "k"], None, "--tie is 'k'; expected NAME=OTHER"),
    "no such pair": ([*WITH_LOSS, "--tie", "k=z"], None, "tie has 'k', .*'z', which is no stored tensor of floats"),
    "no norm": ([*WITH_LOSS, *SGD, "--max-grad-norm", "0"], None, "max_grad_norm is 0.0; expected a positive number"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(name: str, run: Run, tmp_path: Path) -> None:
    options, change, message = BAD[name]
    source = saved(tmp_path / "in.onnx", change or (lambda model: None))
    code, output, errors = run("training-step", source, tmp_path / "step.onnx", *options)
    assert code == 2 and output == ""
    assert errors.count("\n") == 1 and errors.startswith("gradfuse: ")
    assert re.search(message, errors), errors
    assert os.listdir(tmp_path) == ["in.onnx"]


def test_files_that_are_no_models_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    source = saved(tmp_path / "in.onnx")
    before = source.read_bytes()
    for arguments, message in (
        ([tmp_path / "text.onnx", tmp_path / "step.onnx"], "is not an ONNX model"),
        ([tmp_path / "none.onnx", tmp_path / "step.onnx"], "does not exist"),
        ([source, source], "in.onnx"),
        ([source, tmp_path], "is a folder"),
        ([source, tmp_path / "no" / "step.onnx"], "step.onnx"),
    ):
        code, _, errors = run("training-step", *arguments, "--loss", "mse")
        assert code == 2 and message in errors and errors.count("\n") == 1
    assert source.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["in.onnx", "text.onnx"]


def test_operators_are_listed_with_their_limits(run: Run) -> None:
    code, output, _ = run("ops", "--differentiable")
    lines = output.splitlines()
    assert code == 0 and len(lines) == len(differentiable()) > 100
    assert any(line.split() == ["MatMul", "rule"] for line in lines)
    listed: list[dict[str, Any]] = json.loads(run("ops", "--differentiable", "--json")[1])
    by_name = {(one["domain"], one["name"]): one for one in listed}
    assert by_name["", "Resize"]["limits"] == "no policy that keeps the aspect ratio"
    assert by_name["", "Attention"]["by"] == "body"
    assert not by_name.keys() & {("", "QuantizeLinear"), ("", "Greater"), ("", "Unique")}


@pytest.mark.parametrize("place", ["ahead", "behind"])
def test_a_step_is_checked_on_a_batch(place: str, run: Run, tmp_path: Path) -> None:
    source, target, batch = saved(tmp_path / "in.onnx"), tmp_path / "step.onnx", tmp_path / "batch.npz"
    np.savez(batch, x=np.eye(3, dtype=np.float32), target=np.zeros((3, 4), np.float32))
    files = [source, target]
    check = ["--check", batch]
    ordered = [*check, *files] if place == "ahead" else [*files, *check]
    code, _, errors = run("training-step", *ordered, "--loss", "mse")
    assert (code, errors) == (0, "") and target.exists()
    np.savez(batch, x=np.eye(3, dtype=np.float32))
    code, _, errors = run("training-step", *ordered, "--loss", "mse", "--force")
    assert code == 2 and "check has 'x'; expected arrays of 'x', 'target'" in errors


def test_a_check_without_a_batch_takes_no_other_argument(run: Run, tmp_path: Path) -> None:
    source, target = saved(tmp_path / "in.onnx"), tmp_path / "step.onnx"
    code, _, errors = run("training-step", "--check", source, target, "--loss", "mse")
    assert (code, errors) == (0, "") and target.exists()


def test_a_batch_that_is_no_archive_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    source, batch = saved(tmp_path / "in.onnx"), tmp_path / "batch.npz"
    for content in (None, b"no archive"):
        if content is not None:
            batch.write_bytes(content)
        code, _, errors = run("training-step", source, tmp_path / "step.onnx", "--loss", "mse", "--check", batch)
        assert code == 2 and re.search(r"--check is '.*batch.npz': .*; expected what numpy.savez wrote", errors)
