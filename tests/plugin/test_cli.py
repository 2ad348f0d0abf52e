"""The command line: exit codes, one line for every bad input, and output files that are whole or not there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import small_models
from command_runs import Run

import gradfuse
from gradfuse import custom_ops, fusion


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    path = tmp_path / "step.onnx"
    onnx.save(small_models.cross_entropy(), path)
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.onnx"
    onnx.save(small_models.forward(), path)
    return path


def op_types(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


def test_fuse_writes_a_checked_fused_model_and_says_what_it_did(run: Run, trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused.onnx"
    code, output, errors = run("fuse", trained, target, "--check", 2)
    assert code == 0 and errors == ""
    assert "CrossEntropyLossGrad" in op_types(target)
    assert "CrossEntropyLossGrad" in output and output.endswith("checked: same outputs in 2 random runs\n")
    onnx.checker.check_model(target)
    assert gradfuse.check(trained, target).ok


def test_output_is_plain_text_where_there_is_no_terminal(run: Run, trained: Path, tmp_path: Path) -> None:
    _, output, _ = run("fuse", trained, tmp_path / "fused.onnx", "-v")
    assert "\x1b" not in output
    assert "\x1b" not in run("ops")[1] + run("fuse", tmp_path / "nothing.onnx", tmp_path / "x.onnx")[2]


def test_verbose_lists_the_nodes_that_were_replaced(run: Run, trained: Path, tmp_path: Path) -> None:
    quiet = run("fuse", trained, tmp_path / "a.onnx")[1]
    verbose = run("fuse", trained, tmp_path / "b.onnx", "-v")[1]
    assert verbose.startswith(quiet) and " replaces " in verbose.removeprefix(quiet)


def test_a_model_without_a_backward_pass_is_copied_byte_for_byte(run: Run, plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.onnx"
    code, output, _ = run("fuse", plain, target, "--check", 1)
    assert code == 0 and "nothing to fuse" in output
    assert target.read_bytes() == plain.read_bytes()


def test_nothing_to_fuse_with_external_data_keeps_the_data(run: Run, tmp_path: Path) -> None:
    source = small_models.save_with_external_data(small_models.forward(500), tmp_path / "plain.onnx")
    (tmp_path / "out").mkdir()
    assert run("fuse", source, tmp_path / "out" / "out.onnx")[0] == 0
    (tmp_path / "weights.bin").unlink()
    assert gradfuse.check(tmp_path / "out" / "out.onnx", small_models.forward(500)).ok


def with_weights() -> onnx.ModelProto:
    model = small_models.cross_entropy()
    weights = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    del model.graph.input[2]
    return model


def test_external_data_of_a_fused_model_goes_along(run: Run, tmp_path: Path) -> None:
    source = small_models.save_with_external_data(with_weights(), tmp_path / "step.onnx")
    target = tmp_path / "out" / "fused.onnx"
    target.parent.mkdir()
    assert run("fuse", source, target, "--check", 1)[0] == 0
    (tmp_path / "weights.bin").unlink()
    assert "CrossEntropyLossGrad" in op_types(target)
    assert gradfuse.check(with_weights(), target).ok


def test_in_place_overwrites_the_input_only(run: Run, tmp_path: Path) -> None:
    source = small_models.save_with_external_data(with_weights(), tmp_path / "step.onnx")
    weights = (tmp_path / "weights.bin").read_bytes()
    assert run("fuse", source, "--in-place")[0] == 0
    assert "CrossEntropyLossGrad" in op_types(source)
    assert (tmp_path / "weights.bin").read_bytes() == weights
    assert sorted(os.listdir(tmp_path)) == ["step.onnx", "weights.bin"]
    assert gradfuse.check(with_weights(), source).ok


def test_only_and_skip_choose_operators(run: Run, trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused.onnx"
    for options in (["--skip", "CrossEntropyLossGrad"], ["--only", "MseLossBackward"]):
        assert run("fuse", trained, target, *options)[0] == 0
        assert "CrossEntropyLossGrad" not in op_types(target)
    assert run("fuse", trained, target, "--only", "MseLossBackward", "--only", "CrossEntropyLossGrad")[0] == 0
    assert "CrossEntropyLossGrad" in op_types(target)


def test_bodies_can_be_left_out(run: Run, trained: Path, tmp_path: Path) -> None:
    assert run("fuse", trained, tmp_path / "with.onnx")[0] == 0
    assert run("fuse", trained, tmp_path / "without.onnx", "--no-bodies")[0] == 0
    assert onnx.load(tmp_path / "with.onnx").functions and not onnx.load(tmp_path / "without.onnx").functions


def test_report_is_json(run: Run, trained: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert run("fuse", trained, tmp_path / "fused.onnx", "--report", report, "--check", 1)[0] == 0
    data = json.loads(report.read_text())
    assert [f["op"] for f in data["fusions"]] == ["CrossEntropyLossGrad"]
    assert data["fusions"][0]["replaced"] and data["before"]["ScatterElements"] == 1
    assert data["check"]["ok"] is True and data["gradfuse"] == gradfuse.__version__


def test_a_failed_check_writes_nothing_and_exits_3(
    run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fusion.fuse_loaded

    def wrong(*arguments: Any, **options: Any) -> object:
        fused, report = real(*arguments, **options)
        for node in fused.ir.graph:
            if node.op_type == "CrossEntropyLossGrad":
                node.attributes.add(onnx_ir.AttrString("reduction", "mean"))
        return fused, report

    monkeypatch.setattr("gradfuse.fusion.fuse_loaded", wrong)
    before = sorted(os.listdir(tmp_path))
    code, _, errors = run("fuse", trained, tmp_path / "fused.onnx", "--check", 1, "--report", tmp_path / "r.json")
    assert code == 3 and errors.count("\n") == 1 and "'w_grad'" in errors
    assert sorted(os.listdir(tmp_path)) == before


def with_opset(version: int) -> bytes:
    model = small_models.cross_entropy()
    model.opset_import[0].version = version
    return bytes(model.SerializeToString())


def with_missing_data() -> bytes:
    model = small_models.forward()
    tensor = model.graph.initializer[1]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="gone.bin")
    return bytes(model.SerializeToString())


def with_operator(name: str) -> bytes:
    model = small_models.forward()
    model.graph.node[0].op_type = name
    return bytes(model.SerializeToString())


BAD_INPUT: dict[str, tuple[bytes | None, str]] = {
    "no file": (None, "does not exist"),
    "not ONNX": (b"hello world, this is no model\n", "is not an ONNX model"),
    "empty": (b"", "is not an ONNX model"),
    "truncated": (small_models.cross_entropy().SerializeToString()[:200], "is truncated or damaged"),
    "missing external data": (with_missing_data(), "gone.bin"),
    "unknown opset": (with_opset(99), "the default opset is 99"),
    "old opset": (with_opset(6), "the default opset is 6"),
    "unknown operator": (with_operator("MatMull"), "MatMull"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
@pytest.mark.parametrize("command", ["fuse", "fuse in place", "check", "explain"])
def test_bad_input_is_one_line_and_leaves_nothing(case: str, command: str, run: Run, tmp_path: Path) -> None:
    content, reason = BAD_INPUT[case]
    source = tmp_path / "in.onnx"
    if content is not None:
        source.write_bytes(content)
    target = tmp_path / "out.onnx"
    target.write_bytes(b"what was there before")
    arguments = {
        "fuse": ["fuse", source, target, "--report", tmp_path / "r.json"],
        "fuse in place": ["fuse", source, "--in-place"],
        "check": ["check", source, source],
        "explain": ["explain", source],
    }[command]
    before = sorted(os.listdir(tmp_path))
    code, output, errors = run(*arguments)
    assert code == 2 and output == ""
    assert errors.startswith(f"gradfuse: {source}: ") and errors.count("\n") == 1 and reason in errors
    assert sorted(os.listdir(tmp_path)) == before
    assert target.read_bytes() == b"what was there before"
    assert content is None or source.read_bytes() == content


BAD_USAGE = {
    "no arguments": ("fuse", "Missing argument 'IN.onnx'"),
    "no output": ("fuse IN", "OUT.onnx is missing; expected a path, or --in-place"),
    "output is input": ("fuse IN IN", "the same file as IN.onnx; expected another, or --in-place"),
    "output is input, in a command without --in-place": (
        "make-batch-dynamic IN IN",
        "the same file as IN.onnx; expected another\n",
    ),
    "output is a link to the input": ("fuse IN ALIAS", "the same file as IN.onnx"),
    "output besides --in-place": ("fuse IN OUT --in-place", "with --in-place; expected no OUT.onnx"),
    "output is a folder": ("fuse IN DIR", "is a folder; expected a path for the fused model"),
    "output in no folder": ("fuse IN DIR/nowhere/out.onnx", "cannot write the"),
    "unknown operator": ("fuse IN OUT --only Softmax", "only is 'Softmax'; expected one of"),
    "unknown operator to skip": ("fuse IN OUT --skip Softmax", "skip is 'Softmax'; expected one of"),
    "unknown policy": ("fuse IN OUT --policy best", "'best' is not one of"),
    "negative count": ("fuse IN OUT --check -1", "-1 is not in the range"),
    "report is the input": ("fuse IN OUT --report IN", "which is also a model"),
    "report in no folder": ("fuse IN OUT --report DIR/nowhere/r.json", "expected a file in a folder that exists"),
    "unknown option": ("fuse IN OUT --fast", "No such option"),
    "unknown command": ("fusee IN OUT", "No such command 'fusee'"),
    "too many": ("fuse IN OUT OUT", "unexpected extra argument"),
    "one model": ("check IN", "Missing argument 'B.onnx'"),
    "adapters of a model that is no step": (
        "save-adapter IN OUT",
        "is not a training step saved by gradfuse: its metadata has no 'gradfuse.training_step'",
    ),
    "no runs": ("check IN IN --runs 0", "0 is not in the range"),
}


@pytest.mark.parametrize("case", BAD_USAGE)
def test_bad_usage_is_one_line_and_leaves_nothing(case: str, run: Run, trained: Path, tmp_path: Path) -> None:
    arguments, reason = BAD_USAGE[case]
    folder = tmp_path / "folder"
    folder.mkdir()
    link = tmp_path / "link.onnx"
    link.symlink_to(trained)
    content = trained.read_bytes()
    before = sorted(os.listdir(tmp_path))
    for name, path in {"IN": trained, "OUT": tmp_path / "out.onnx", "ALIAS": link, "DIR": folder}.items():
        arguments = arguments.replace(name, str(path))
    code, output, errors = run(*arguments.split())
    assert code == 2 and output == ""
    assert errors.startswith("gradfuse: ") and errors.count("\n") == 1 and reason in errors
    assert sorted(os.listdir(tmp_path)) == before and trained.read_bytes() == content


def test_expand_gives_standard_operators_back(run: Run, trained: Path, tmp_path: Path) -> None:
    fused, expanded = tmp_path / "fused.onnx", tmp_path / "expanded.onnx"
    assert run("fuse", trained, fused)[0] == 0
    code, output, _ = run("expand", fused, expanded)
    assert code == 0 and output.startswith("expanded ")
    assert {node.domain for node in onnx.load(expanded).graph.node} == {""}
    assert run("check", trained, expanded)[0] == 0
    code, output, _ = run("expand", trained, tmp_path / "same.onnx")
    assert code == 0 and "nothing to expand" in output


def test_check_tells_equal_models_from_different_ones(run: Run, trained: Path, plain: Path, tmp_path: Path) -> None:
    code, output, errors = run("check", trained, trained)
    assert code == 0 and output.startswith("same outputs in 3 random runs") and errors == ""
    other = small_models.cross_entropy()
    other.graph.node[2].attribute[0].s = b"mean"
    onnx.save(other, tmp_path / "other.onnx")
    code, output, errors = run("check", trained, tmp_path / "other.onnx", "--runs", 1)
    assert code == 3 and output.startswith("outputs differ in 1 random run") and "WRONG" in output and errors == ""
    code, output, _ = run("check", trained, tmp_path / "other.onnx", "--json")
    assert code == 3 and [o["ok"] for o in json.loads(output)["outputs"]] == [False, True]
    code, _, errors = run("check", trained, plain)
    assert code == 2 and "the inputs are x; expected x, target, w" in errors


def test_explain_says_what_the_function_says(run: Run, trained: Path, tmp_path: Path) -> None:
    before = trained.read_bytes()
    code, output, errors = run("explain", trained)
    assert code == 0 and errors == "" and output == f"{gradfuse.explain(trained)}\n" and "\x1b" not in output
    code, output, _ = run("explain", trained, "--json")
    data = json.loads(output)
    assert code == 0 and data.pop("in") == str(trained) and data.pop("gradfuse") == gradfuse.__version__
    assert data == json.loads(json.dumps(gradfuse.explain(trained).to_dict()))
    assert os.listdir(tmp_path) == ["step.onnx"] and trained.read_bytes() == before


@pytest.mark.parametrize("command", ["fuse", "explain"])
def test_warnings_go_to_standard_error(command: str, run: Run, tmp_path: Path) -> None:
    model = small_models.cross_entropy()
    model.graph.node[2].attribute[0].s = b"mean"
    onnx.save(model, tmp_path / "step.onnx")
    targets = [tmp_path / "fused.onnx"] if command == "fuse" else []
    code, output, errors = run(command, tmp_path / "step.onnx", *targets)
    assert code == 0 and "warning" not in output and "CrossEntropyLossGrad" in output
    assert errors.startswith("warning: loss: the loss is a mean") and errors.count("\n") == 1


def test_explain_takes_damaged_files_in_one_line(run: Run, trained: Path, tmp_path: Path) -> None:
    content = trained.read_bytes()
    damaged = tmp_path / "damaged.onnx"
    for length in range(0, len(content), 37):
        flipped = bytes([*content[:length], content[length] ^ 0x55, *content[length + 1 :]])
        for data in (content[:length], flipped):
            damaged.write_bytes(data)
            code, _, errors = run("explain", damaged)
            assert code == 0 or (code == 2 and errors.startswith("gradfuse: ") and errors.count("\n") == 1)


def test_ops_describes_every_operator(run: Run) -> None:
    code, output, _ = run("ops", "--json")
    assert code == 0
    data = json.loads(output)
    assert (data["domain"], data["version"]) == ("aclnn", 1)
    assert [op["name"] for op in data["ops"]] == list(custom_ops.OPS)
    by_name = {op["name"]: op for op in data["ops"]}
    mse = by_name["MseLossBackward"]
    assert [value["name"] for value in mse["inputs"]] == ["grad_output", "self", "target"]
    assert [(a["name"], a["type"], a["default"]) for a in mse["attributes"]] == [("reduction", "int", 1)]
    assert [value["optional"] for value in by_name["ScaledMaskedSoftmaxBackward"]["inputs"]] == [False, False, True]
    text = run("ops")[1]
    for name, op in by_name.items():
        assert f"aclnn::{name}" in text
        assert all(value["name"] in text for value in op["inputs"] + op["attributes"])


def test_info_tells_what_the_function_tells(run: Run) -> None:
    code, output, _ = run("info", "--json")
    assert code == 0 and json.loads(output) == gradfuse.info()
    assert gradfuse.get_library_path() in run("info")[1]


def test_help_and_version(run: Run) -> None:
    assert gradfuse.__version__ in run("--version")[1]
    assert run("--help")[0] == 0
    code, output, errors = run()
    assert code == 0 and "fuse" in output + errors
    for command in ("fuse", "explain", "expand", "check", "ops", "info"):
        assert run(command, "--help")[0] == 0


def test_the_module_runs_and_the_command_is_installed(trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradfuse"]
    result = subprocess.run([*command, "fuse", trained, tmp_path / "o.onnx"], capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == ""
    result = subprocess.run(
        [*command, "fuse", tmp_path / "nothing", tmp_path / "o.onnx"], capture_output=True, text=True
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


def test_a_full_disk_leaves_nothing(run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnx_ir.save", fail)
    before = sorted(os.listdir(tmp_path))
    code, _, errors = run("fuse", trained, tmp_path / "fused.onnx")
    assert code == 2 and errors.endswith("cannot write the model: No space left on device\n")
    assert sorted(os.listdir(tmp_path)) == before


def test_a_second_run_gives_the_same_bytes(run: Run, trained: Path, tmp_path: Path) -> None:
    copy = shutil.copy(trained, tmp_path / "copy.onnx")
    assert run("fuse", trained, tmp_path / "a.onnx")[0] == run("fuse", copy, tmp_path / "b.onnx")[0] == 0
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
