"""Files and models that were found to break the command line: each is done or refused in one line, and does no harm."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import small_models
from command_runs import Run, runner
from onnx import TensorProto, helper

import gradfuse
from gradfuse import cli
from gradfuse.models import files, reading, writing

FINDINGS = Path(__file__).parents[1] / "findings"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process, in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    command = runner(capfd)
    return lambda line: command(*line.split())


COMMANDS = ("fuse MODEL out.onnx", "explain MODEL", "check MODEL MODEL --runs 1", "expand MODEL out.onnx")
REFUSED = {
    "init_size": "initializer 'k' has 8 bytes; expected 4 for the dimensions [1]",
    "recursive_function": "foo::F",
    "missing_value": "nowhere",
    "reference_attribute": "batch_dims is a reference to attribute 'depth' of a function; expected a value",
    "laughs": "its functions amount to 536870912 nodes where they are called",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("command", COMMANDS)
def test_malformed_models_are_refused_in_one_line(name: str, command: str, run: Run) -> None:
    shutil.copy(FINDINGS / f"{name}.onnx", ".")
    start = time.monotonic()
    code, output, errors = run(command.replace("MODEL", f"{name}.onnx"))
    assert code == 2 and output == "" and errors.count("\n") == 1
    assert errors.startswith(f"gradfuse: {name}.onnx: ") and REFUSED[name] in errors
    assert os.listdir() == [f"{name}.onnx"]
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("name", ["dimname", "dimname_empty"])
@pytest.mark.parametrize("command", COMMANDS)
def test_dimensions_have_any_names(name: str, command: str, run: Run) -> None:
    shutil.copy(FINDINGS / f"{name}.onnx", ".")
    code, _, errors = run(command.replace("MODEL", f"{name}.onnx"))
    assert code == 0 and errors == ""


def test_a_model_that_no_memory_can_hold_the_inputs_of_is_not_checked(run: Run) -> None:
    shutil.copy(FINDINGS / "hugedim.onnx", ".")
    code, _, errors = run("check hugedim.onnx hugedim.onnx")
    assert code == 2 and errors.count("\n") == 1
    assert "hugedim.onnx: input 'x' has shape (1099511627776, 5); expected inputs of at most" in errors
    assert run("fuse hugedim.onnx out.onnx")[0] == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("way", ["..", "absolute", "symbolic link", "hard link", "linked folder"])
def test_no_command_looks_at_files_outside_the_folder_of_the_model(way: str, command: str, run: Run) -> None:
    """Behind a node of a later opset, for which onnx's checker gives up."""
    os.mkdir("m")
    Path("secret.bin").write_bytes(bytes(120))
    location = {"..": "../secret.bin", "absolute": os.path.abspath("secret.bin"), "linked folder": "up/secret.bin"}
    model = onnx.load(FINDINGS / "external_outside.onnx", load_external_data=False)
    (tensor,) = (a.t for n in model.graph.node for a in n.attribute if a.t.external_data)
    entry = next(e for e in tensor.external_data if e.key == "location")
    entry.value = location.get(way, "data.bin")
    if way == "symbolic link":
        os.symlink("../secret.bin", "m/data.bin")
    elif way == "hard link":
        os.link("secret.bin", "m/data.bin")
    elif way == "linked folder":
        os.symlink("..", "m/up")
    Path("m/in.onnx").write_bytes(model.SerializeToString())
    code, output, errors = run(command.replace("MODEL", "m/in.onnx"))
    assert code == 2 and output == "" and errors.count("\n") == 1
    assert errors.startswith("gradfuse: m/in.onnx: the external data of 'W' is in ")
    assert not os.path.exists("out.onnx")


def test_what_expand_leaves_of_a_domain_keeps_its_import(run: Run) -> None:
    shutil.copy(FINDINGS / "expand_unknown.onnx", ".")
    code, output, _ = run("expand expand_unknown.onnx out.onnx")
    assert code == 0 and output == "expanded 1 nodes\n"
    onnx.checker.check_model("out.onnx")
    assert [n.op_type for n in onnx.load("out.onnx").graph.node if n.domain == "aclnn"] == ["Identity"]


def chain(count: int, summed: bool) -> onnx.ModelProto:
    """A value that is added to itself again and again; at first a sum, or an input."""
    axes = onnx.numpy_helper.from_array(np.array([1]), "axes")
    nodes = [helper.make_node("ReduceSum", ["x", "axes"], ["v0"]) if summed else helper.make_node("Neg", ["x"], ["v0"])]
    nodes += [helper.make_node("Add", [f"v{k}", f"v{k}"], [f"v{k + 1}"]) for k in range(count)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 5])
    y = helper.make_tensor_value_info(f"v{count}", TensorProto.FLOAT, [4, 1 if summed else 5])
    graph = helper.make_graph(nodes, "chain", [x], [y], [axes] if summed else [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.long
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_long_chains_take_no_long_time(command: str, summed: bool, run: Run) -> None:
    onnx.save(chain(6000, summed), "in.onnx")
    start = time.process_time()
    assert run(command.replace("MODEL", "in.onnx"))[0] == 0
    assert time.process_time() - start < 20


@pytest.mark.long
def test_the_time_of_fused_nodes_is_linear_in_their_number_when_they_are_expanded(run: Run) -> None:
    model = onnx.load(FINDINGS / "expand_unknown.onnx")
    del model.graph.node[:]
    names = ["x", *(f"v{k}" for k in range(1000))]
    for before, after in itertools.pairwise(names):
        model.graph.node.append(helper.make_node("MseLossBackward", ["go", before, "t"], [after], domain="aclnn"))
    model.graph.output[0].name = names[-1]
    onnx.save(model, "in.onnx")
    start = time.process_time()
    assert run("expand in.onnx out.onnx")[0] == 0
    assert time.process_time() - start < 20
    onnx.checker.check_model("out.onnx")


# Outputs


@pytest.fixture
def weights(tmp_path: Path) -> onnx.ModelProto:
    """A model in the folder, `in.onnx`, whose weights are in `w.data`; something is fused in it."""
    model = onnx.parser.parse_model(
        small_models.CROSS_ENTROPY.replace("[n, 4]", "[n, 99]").replace("[4, 5]", "[99, 5]")
    )
    values = np.linspace(-1, 1, 495, dtype=np.float32).reshape(99, 5)
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, "w"))
    del model.graph.input[2]
    kept = onnx.ModelProto()
    kept.CopyFrom(model)
    small_models.save_with_external_data(model, tmp_path / "in.onnx", "w.data")
    return kept


def snapshot(folder: Path) -> dict[str, object]:
    """All that is in a folder: kinds, links, and contents of files."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content: object = stat.S_IFMT(mode)
        if stat.S_ISLNK(mode):
            content = os.readlink(path)
        elif stat.S_ISREG(mode):
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = content
    return found


PRECIOUS = "mkdir there; echo precious > there/out.onnx.data"
DESTRUCTIVE = {
    "weights as OUT": ("true", "fuse in.onnx w.data", "w.data"),
    "weights as OUT of expand": ("true", "expand in.onnx w.data", "w.data"),
    "weights as OUT by another path": ("mkdir sub", "fuse in.onnx ./sub/../w.data", "w.data"),
    "weights as the report": ("true", "fuse in.onnx out.onnx --report w.data", "w.data"),
    "a link to the weights": ("ln -s w.data link.onnx", "fuse in.onnx link.onnx", "link.onnx"),
    "a link to the weights as the report": ("ln -s w.data r.json", "fuse in.onnx out.onnx --report r.json", "r.json"),
    "a hard link to the input": ("ln in.onnx same.onnx", "fuse in.onnx same.onnx", "same.onnx"),
    "a link to the input": ("ln -s in.onnx same.onnx", "expand in.onnx same.onnx", "same.onnx"),
    "a hard link to the input as the report": ("ln in.onnx r.json", "fuse in.onnx out.onnx --report r.json", "r.json"),
    "the report is OUT": ("true", "fuse in.onnx out.onnx --report out.onnx", "out.onnx"),
    "the report is a link to OUT": ("ln -s out.onnx r.json", "fuse in.onnx out.onnx --report r.json", "r.json"),
    "the report is OUT's data": ("true", "fuse in.onnx out.onnx --report out.onnx.data", "out.onnx.data"),
    "data of something else": (PRECIOUS, "fuse in.onnx there/out.onnx", "there/out.onnx.data"),
    "data of something else, of expand": (PRECIOUS, "expand in.onnx there/out.onnx", "there/out.onnx.data"),
    "data of something else beside a model": (
        f"{PRECIOUS}; cp in.onnx there/out.onnx",
        "fuse in.onnx there/out.onnx",
        "there/out.onnx.data",
    ),
    "data is a pipe": (
        "mkdir there; mkfifo there/out.onnx.data",
        "fuse in.onnx there/out.onnx --force",
        "a named pipe",
    ),
    "data is a folder": ("mkdir -p there/out.onnx.data", "fuse in.onnx there/out.onnx --force", "is a folder"),
    "data is a link": (
        "mkdir there; ln -s ../w.data there/out.onnx.data",
        "fuse in.onnx there/out.onnx --force",
        "there/out.onnx.data: is a symbolic link",
    ),
    "a pipe": ("mkfifo pipe", "fuse in.onnx pipe", "pipe: is a named pipe; expected a path for"),
    "a link to a pipe": ("mkfifo pipe; ln -s pipe link", "fuse in.onnx link", "link: is a named pipe"),
    "a pipe as the report": ("mkfifo pipe", "fuse in.onnx out.onnx --report pipe", "pipe: is a named pipe"),
    "a pipe as OUT of expand": ("mkfifo pipe", "expand in.onnx pipe", "pipe: is a named pipe"),
    "a pipe as OUT of to-stock": ("mkfifo pipe", "to-stock . pipe", "pipe: is a named pipe"),
    "a folder as the report": ("mkdir there", "fuse in.onnx out.onnx --report there", "there: is a folder"),
    "a link that goes in circles": ("ln -s loop loop", "fuse in.onnx loop", "loop: cannot be written"),
}


@pytest.mark.parametrize("case", DESTRUCTIVE)
def test_outputs_destroy_nothing(case: str, run: Run, weights: onnx.ModelProto, tmp_path: Path) -> None:
    preparation, command, named = DESTRUCTIVE[case]
    subprocess.run(["bash", "-c", preparation], check=True, cwd=tmp_path)
    before = snapshot(tmp_path)
    code, output, errors = run(command)
    assert code == 2 and output == ""
    assert errors.startswith("gradfuse: ") and errors.count("\n") == 1 and named in errors
    assert snapshot(tmp_path) == before


def test_a_device_stays_a_device(run: Run, weights: onnx.ModelProto, tmp_path: Path) -> None:
    try:
        os.mknod("device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        # Only root makes devices; a terminal is one too.
        _, terminal = os.openpty()
        os.symlink(os.ttyname(terminal), "device")
    before = snapshot(tmp_path)
    for command in ("fuse in.onnx device", "expand in.onnx device", "fuse in.onnx out.onnx --report device"):
        code, _, errors = run(command)
        assert code == 2 and errors.count("\n") == 1 and "device: is a device; expected a path for" in errors
    assert snapshot(tmp_path) == before


def test_a_model_is_fused_to_the_same_place_again(run: Run, weights: onnx.ModelProto, tmp_path: Path) -> None:
    os.mkdir("there")
    for _ in range(2):
        assert run("fuse in.onnx there/out.onnx --report there/report.json")[0] == 0
        assert sorted(os.listdir("there")) == ["out.onnx", "out.onnx.data", "report.json"]
        assert gradfuse.check(weights, "there/out.onnx").ok
    assert run("expand there/out.onnx there/out.onnx --in-place")[0] == 0
    assert gradfuse.check(weights, "there/out.onnx").ok


def test_data_of_something_else_is_overwritten_by_force(run: Run, weights: onnx.ModelProto) -> None:
    os.mkdir("there")
    Path("there/out.onnx.data").write_text("of no use")
    assert run("fuse in.onnx there/out.onnx --force")[0] == 0
    assert gradfuse.check(weights, "there/out.onnx").ok


def test_a_model_beside_its_input_takes_no_data_file_of_it(run: Run, weights: onnx.ModelProto) -> None:
    """The input's own data file has the name that the output's would have."""
    os.mkdir("there")
    small_models.save_with_external_data(weights, Path("there/in.onnx"), "out.onnx.data")
    data = Path("there/out.onnx.data").read_bytes()
    assert run("fuse there/in.onnx there/out.onnx")[0] == 0
    assert Path("there/out.onnx.data").read_bytes() == data
    with pytest.raises(gradfuse.ModelError, match=r"out\.onnx\.data: exists and does not belong to a model at"):
        os.remove("there/out.onnx")
        writing.save(reading.load("there/in.onnx").ir, "there/out.onnx")


def test_a_saved_step_replaces_no_other_model(tmp_path: Path) -> None:
    model = small_models.forward()
    arrays = {"b": np.full(1, 0.5, np.float32)}
    loss = onnx.ModelProto()
    loss.CopyFrom(model)
    loss.graph.output[0].name = loss.graph.node[-1].output[0] = "loss"
    step = gradfuse.TrainingStep(loss, {}, {}, ("x",), (), constants=arrays, evaluation_model=model)
    other = tmp_path / "step.eval.onnx"
    other.write_bytes(b"of something else")
    with pytest.raises(gradfuse.ModelError, match=r"step\.eval\.onnx: exists and does not belong to a step at"):
        step.save(tmp_path / "step.onnx")
    assert os.listdir(tmp_path) == ["step.eval.onnx"] and other.read_bytes() == b"of something else"
    step.save(tmp_path / "step.onnx", force=True)
    step.save(tmp_path / "step.onnx")
    assert gradfuse.TrainingStep.load(tmp_path / "step.onnx").evaluation_model is not None


# Processes that are killed

_WRITER = """
import os, signal, sys
import onnx_ir as ir
from gradfuse.models import reading, writing
where, at, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = reading.load("in.onnx").ir
owner = ir if where == "save" else os
real, calls = getattr(owner, where), []
def stop(*arguments, **options):
    calls.append(arguments)
    if len(calls) == at and end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if len(calls) == at:
        print("here", flush=True)
        sys.stdin.readline()
    return real(*arguments, **options)
setattr(owner, where, stop)
writing.save(model, "there/out.onnx")
"""
"""Writes a model, and at the given call of a function of files is killed, or waits."""


def writer(where: str, at: int, end: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITER, where, str(at), end]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# At the first of two renames of data files the old one goes; at the second, the new one comes.
@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "had"), [("save", False), ("save", True), ("rename", True), ("replace", False), ("replace", True)]
)
def test_the_next_run_clears_what_a_killed_one_left(
    where: str, had: bool, run: Run, weights: onnx.ModelProto, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    if had:
        small_models.save_with_external_data(small_models.forward(9), there / "out.onnx", "out.onnx.data")
    before = snapshot(there)
    process = writer(where, 2 if where == "rename" else 1, "killed")
    assert process.wait(60) == -signal.SIGKILL
    process.communicate()
    assert snapshot(there) != before
    # A run that fails restores what was there; one that succeeds replaces it.
    with files.temporary_folder(str(there), "unrelated"), pytest.raises(OSError, match="full"):
        files.write(there / "out.onnx", _fail)
    assert snapshot(there) == before
    assert run("fuse in.onnx there/out.onnx")[0] == 0
    assert sorted(os.listdir(there)) == ["out.onnx", "out.onnx.data"]
    assert gradfuse.check(weights, there / "out.onnx").ok


def _fail(path: str) -> None:
    raise OSError("full")


def test_a_run_takes_nothing_of_another_that_is_alive(run: Run, weights: onnx.ModelProto, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    with writer("save", 1, "alive") as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "here\n"
        (folder,) = os.listdir(there)
        assert run("fuse in.onnx there/out.onnx")[0] == 0
        assert sorted(os.listdir(there)) == [folder, "out.onnx", "out.onnx.data"]
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    assert sorted(os.listdir(there)) == ["out.onnx", "out.onnx.data"]
    assert ir.load(there / "out.onnx").graph.initializers


# What nobody thought of


def test_an_unforeseen_exception_is_one_line_that_asks_for_a_report(
    run: Run, weights: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise KeyError("a\nb")

    monkeypatch.setattr("gradfuse.fusion.fuse_loaded", fail)
    before = snapshot(tmp_path)
    code, output, errors = run("fuse in.onnx out.onnx")
    assert code == cli.EXIT_BUG == 4 and output == "" and errors.count("\n") == 1
    assert errors.startswith("gradfuse: a bug in gradfuse, please report it") and "KeyError" in errors
    code, _, errors = run("fuse in.onnx out.onnx -v")
    assert code == 4 and errors.startswith("Traceback") and 'raise KeyError("a\\nb")' in errors
    assert snapshot(tmp_path) == before


def test_names_from_models_stay_in_one_line(run: Run) -> None:
    model = small_models.forward()
    model.graph.node[0].input[0] = "no\nwhere\x1b[31m"
    onnx.save(model, "in.onnx")
    for command in COMMANDS:
        code, _, errors = run(command.replace("MODEL", "in.onnx"))
        assert code == 2 and errors.count("\n") == 1 and "\x1b" not in errors


def test_a_reader_that_goes_away_is_no_error_to_speak_of() -> None:
    command = f"{sys.executable} -m gradfuse ops --json | head -c 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stdout == "{" and result.stderr == ""


def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    result = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m gradfuse ops > /dev/full"], capture_output=True, text=True
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "No space left on device" in result.stderr
