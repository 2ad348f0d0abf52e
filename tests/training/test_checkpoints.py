"""Checkpoints: a trainer that is killed or interrupted at any moment resumes as if it had never stopped."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy
import torch
import torch.nn.functional as F
from torch import nn
from training.models import SHAPES

import gradfuse
from gradfuse import ArgumentError, GradfuseError, ModelError, TrainingSession, TrainingStep
from gradfuse.models import files
from gradfuse.training import checkpoints

Arrays = dict[str, npt.NDArray[Any]]

KEY = "gradfuse.checkpoint"
RNG = np.random.default_rng(0)
DATA = [(RNG.standard_normal((8, 16)).astype(np.float32), RNG.integers(0, 3, 8)) for _ in range(24)]


@pytest.fixture(scope="module")
def step() -> TrainingStep:
    """Has dropout, batch normalisation, Adam, and two calls an update: state of every kind."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    batch = tuple(map(torch.from_numpy, DATA[0]))
    return gradfuse.export_training_step(
        module, F.cross_entropy, (batch[0], batch[1]), optimizer, dynamic_shapes=SHAPES, accumulate=2
    )


def everything(session: TrainingSession) -> Arrays:
    return {name: value.numpy().copy() for name, value in session.ort_values.items()}


def assert_same(actual: Arrays, wanted: Arrays) -> None:
    assert actual.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(actual[name], array, strict=True)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("stop", [0, 3, 8])
def test_resuming_is_bit_identical(step: TrainingStep, tmp_path: Path, stop: int, wait: bool) -> None:
    """Also in the middle of an accumulation, with the learning rate, and the order of the data."""
    path, order = tmp_path / "state.safetensors", np.random.default_rng(1)
    session = TrainingSession(step)
    session.learning_rate = 0.02
    for _ in range(stop):
        session.step(*DATA[order.integers(len(DATA))])
    session.save(path, wait=wait, extra={"order": order.bit_generator.state, "note": [1.5, None, {"ü": True}]})
    going_on = [session.step(*DATA[order.integers(len(DATA))]) for _ in range(6)]
    session.wait()

    resumed, again = TrainingSession(step), np.random.default_rng(2)
    resumed.step(*DATA[0])
    kept = resumed.load(path)
    assert kept["note"] == [1.5, None, {"ü": True}]
    assert resumed.step_count == stop and resumed.learning_rate == session.learning_rate
    again.bit_generator.state = kept["order"]
    assert [resumed.step(*DATA[again.integers(len(DATA))]) for _ in range(6)] == going_on
    assert resumed.step_count == session.step_count == stop + 6
    assert_same(everything(resumed), everything(session))
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.safetensors"]


class Gate:
    """Holds back whatever writes a file, as a slow disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        original = files.write_file

        def write_file(*arguments: Any, **options: Any) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            original(*arguments, **options)

        monkeypatch.setattr(files, "write_file", write_file)


def test_training_goes_on_while_the_copies_are_written(
    step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other, path = TrainingSession(step), TrainingSession(step), tmp_path / "state.safetensors"
    for batch in DATA[:3]:
        assert session.step(*batch) == other.step(*batch)
    before = everything(session)
    gate = Gate(monkeypatch)
    monkeypatch.chdir(tmp_path)
    session.save("state.safetensors", wait=False)
    assert gate.reached.wait(60)
    monkeypatch.chdir("/")
    losses = [session.step(*batch) for batch in DATA[3:8]]
    assert losses == [other.step(*batch) for batch in DATA[3:8]]
    assert not path.exists()
    gate.opened.set()
    session.wait()
    stored = safetensors.numpy.load_file(path)
    assert_same({name: stored[name] for name in before}, before)
    assert TrainingSession(step).load(path) == {}


@pytest.mark.parametrize("then", ["save", "load", "wait"])
def test_files_are_written_one_after_the_other(
    step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """So the older one never takes the place of the newer."""
    session, path = TrainingSession(step), tmp_path / "state.safetensors"
    gate = Gate(monkeypatch)
    session.save(path, wait=False, extra={"which": "older"})
    assert gate.reached.wait(60)
    session.step(*DATA[0])
    threading.Timer(0.2, gate.opened.set).start()
    if then == "save":
        session.save(path, extra={"which": "newer"})
    elif then == "load":
        assert session.load(path) == {"which": "older"} and session.step_count == 0
    else:
        session.wait()
    assert gate.opened.is_set()
    assert TrainingSession(step).load(path) == {"which": "newer" if then == "save" else "older"}


def test_a_thread_that_waits_does_not_end_the_wait_for_a_later_file(
    step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, path = TrainingSession(step), tmp_path / "state.safetensors"
    first = Gate(monkeypatch)
    session.save(path, wait=False, extra={"which": "older"})
    assert first.reached.wait(60)
    second, original, joined = Gate(monkeypatch), threading.Thread.join, threading.Event()

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        original(thread, timeout)
        if threading.current_thread() is waiting:
            joined.set()
            assert second.reached.wait(60)

    monkeypatch.setattr(threading.Thread, "join", join)
    waiting = threading.Thread(target=session.wait)
    waiting.start()
    first.opened.set()
    assert joined.wait(60)
    session.save(path, wait=False, extra={"which": "newer"})
    original(waiting)
    threading.Timer(0.2, second.opened.set).start()
    session.wait()
    assert TrainingSession(step).load(path) == {"which": "newer"}


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def failed_in_the_background(session: TrainingSession, path: Path) -> None:
    """Let a save fail, after the call of it."""
    with full_disk(1000):
        session.save(path, wait=False)
        for thread in threading.enumerate():
            if thread.name == "gradfuse checkpoint":
                thread.join()


@pytest.mark.parametrize(
    "call",
    [
        lambda session, path: session.step(*DATA[0]),
        lambda session, path: session.evaluate(DATA[0][0]),
        lambda session, path: session.save(path),
        lambda session, path: session.save(path, wait=False),
        lambda session, path: session.load(path),
        lambda session, path: session.wait(),
    ],
    ids=["step", "evaluate", "save", "save in the background", "load", "wait"],
)
def test_an_error_of_the_thread_reaches_the_next_call(
    step: TrainingStep, tmp_path: Path, call: Callable[[TrainingSession, Path], Any]
) -> None:
    session, path = TrainingSession(step), tmp_path / "state.safetensors"
    session.save(path)
    content, before = path.read_bytes(), everything(session)
    failed_in_the_background(session, path)
    with pytest.raises(ModelError, match=r"state\.safetensors: cannot write the file: .*[Ff]ile too large") as error:
        call(session, path)
    assert "\n" not in str(error.value)
    assert_same(everything(session), before)
    assert session.step_count == 0
    assert path.read_bytes() == content
    # Once.
    call(session, path)
    session.wait()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.safetensors"]


def test_an_error_that_nobody_asks_for_is_a_warning(step: TrainingStep, tmp_path: Path) -> None:
    session = TrainingSession(step)
    failed_in_the_background(session, tmp_path / "state.safetensors")
    with pytest.warns(RuntimeWarning, match=r"no checkpoint was written: .*cannot write the file"):
        del session
        gc.collect()
    session = TrainingSession(step)
    failed_in_the_background(session, tmp_path / "state.safetensors")
    with pytest.raises(ModelError):
        session.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del session
        gc.collect()


def test_a_program_ends_after_its_last_checkpoint(step: TrainingStep, tmp_path: Path) -> None:
    step.save(tmp_path / "step.onnx")
    code = (
        "import time, gradfuse; from gradfuse.models import files\n"
        "session, original = gradfuse.TrainingSession('step.onnx'), files.write_file\n"
        "files.write_file = lambda *a, **k: (time.sleep(0.5), original(*a, **k))\n"
        "session.save('state.safetensors', wait=False, extra={'last': 1})\n"
    )
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stderr == ""
    assert TrainingSession(step).load(tmp_path / "state.safetensors") == {"last": 1}
    run[2] = code.replace("original(*a, **k)", "open('missing/file')")
    result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "no checkpoint was written: [Errno 2]" in result.stderr


def test_what_is_wrong_at_once_is_said_at_once(step: TrainingStep, tmp_path: Path) -> None:
    step.save(tmp_path / "step.onnx")
    session = TrainingSession(tmp_path / "step.onnx")
    for path, reason in ((tmp_path, "is a folder"), (tmp_path / "step.onnx", "which the input is read from")):
        with pytest.raises(ModelError, match=reason):
            session.save(path, wait=False)
    wanted = "extra cannot be written: .*; expected what JSON can hold"
    cyclic: dict[str, Any] = {}
    cyclic["again"] = [cyclic]
    for extra, message in (
        (3, "extra is 3; expected a dictionary"),
        ([1], r"extra is \[1\]; expected a dictionary"),
        ({"a": np.float32(1)}, wanted),
        ({"a": np.random.default_rng(0)}, wanted),
        ({"a": [{1: 2}]}, "extra has the key 1; expected text"),
        (cyclic, wanted),
    ):
        for wait in (True, False):
            with pytest.raises(ArgumentError, match=rf"TrainingSession\.save: {message}") as error:
                session.save(tmp_path / "state", wait=wait, extra=extra)  # type: ignore[arg-type]
            assert "\n" not in str(error.value)
    assert {entry.name for entry in tmp_path.iterdir()} == {"step.onnx", "step.eval.onnx"}


def test_files_of_others_start_at_step_0_and_damaged_ones_change_nothing(step: TrainingStep, tmp_path: Path) -> None:
    session, path = TrainingSession(step), tmp_path / "state.safetensors"
    session.step(*DATA[0])
    session.save(path, extra={"a": 1})
    stored = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(stored, path)
    assert session.load(path) == {} and session.step_count == 0
    session.save(path, optimizer=False, extra={"a": 1})
    assert set(safetensors.numpy.load_file(path)) == set(session.state_dict())
    session.step(*DATA[0])
    assert session.load(path) == {"a": 1} and session.step_count == 0
    before = everything(session)
    for text in ("", "[]", "3", '{"step_count": -1}', '{"step_count": true}', '{"extra": []}', "[" * 100_000):
        safetensors.numpy.save_file(stored, path, {KEY: text})
        with pytest.raises(ModelError, match=rf"state\.safetensors: its {KEY} cannot be understood") as error:
            session.load(path)
        assert "\n" not in str(error.value)
        assert_same(everything(session), before)


def test_the_disk_has_the_file_before_its_name(
    step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kill -9 cannot show: a power cut loses what was not synced."""
    session, path = TrainingSession(step), tmp_path / "state.safetensors"
    session.save(path)
    done: list[tuple[str, int | str]] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        # Of a file that was written to the end.
        status = os.fstat(descriptor)
        done.append(("sync", status.st_ino))
        sync(descriptor)

    def renamed(source: str, target: str) -> None:
        done.append(("rename", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    session.save(path, wait=False)
    session.wait()
    file = path.stat().st_ino
    assert done == [("sync", file), ("rename", file), ("sync", tmp_path.stat().st_ino)]


@pytest.mark.parametrize(
    "kind",
    [KeyboardInterrupt, *(pytest.param(kind, marks=pytest.mark.long) for kind in (TimeoutError, RuntimeError))],
)
def test_a_signal_finds_a_step_done_or_not_begun(large_step: TrainingStep, kind: type[BaseException]) -> None:
    """Handlers raise within `step`, mostly just after onnxruntime has run; parameters are written in place."""
    data = [(RNG.standard_normal((8, 256), np.float32), RNG.integers(0, 10, 8)) for _ in range(60)]
    reference, session = TrainingSession(large_step), TrainingSession(large_step)
    pairs = []
    for batch in data[:10]:
        start = time.perf_counter()
        assert reference.step(*batch) == session.step(*batch)
        pairs.append(time.perf_counter() - start)
    # Of the fastest, as a machine that does something else at first would interrupt none.
    seconds = min(pairs) / 2
    generator, interrupted, done = random.Random(0), 0, 0

    def interrupt(*_: Any) -> None:
        raise kind("of the handler")

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        while session.step_count < len(data):
            before = session.step_count
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-6, 2 * seconds))
                session.step(*data[before])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except kind as error:
                assert str(error) == "of the handler"
                interrupted += 1
                done += session.step_count > before
            for batch in data[reference.step_count : session.step_count]:
                reference.step(*batch)
            assert session.step_count == reference.step_count
            assert_same(everything(session), everything(reference))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert interrupted > done > 5


TRAINER = """
import os, sys
import numpy as np
import gradfuse

wait, total = sys.argv[1] == "wait", int(sys.argv[2])
session, path = gradfuse.TrainingSession("step.onnx"), "state.safetensors"
losses, order = [], np.random.default_rng(0)
if os.path.exists(path):
    kept = session.load(path)
    losses, order.bit_generator.state = kept["losses"], kept["order"]
print("training", flush=True)
while session.step_count < total:
    x = order.standard_normal((8, 256), np.float32)
    losses.append(session.step(x, order.integers(0, 10, 8)))
    session.save(path, wait=wait, extra={"losses": losses, "order": order.bit_generator.state})
session.wait()
"""


@pytest.fixture(scope="module")
def large_step() -> TrainingStep:
    """Its checkpoint takes longer to write than a step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2048, 10))
    batch = torch.randn(8, 256), torch.randint(0, 10, (8,))
    return gradfuse.export_training_step(
        module, F.cross_entropy, batch, torch.optim.AdamW(module.parameters()), dynamic_shapes=SHAPES
    )


def start(folder: Path, wait: bool, total: int) -> subprocess.Popen[str]:
    program = subprocess.Popen(
        [sys.executable, "-c", TRAINER, "wait" if wait else "go on", str(total)],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None and program.stdout.readline() == "training\n"
    return program


def content_of(path: Path) -> tuple[Arrays, Any]:
    """Read by safetensors alone."""
    with safetensors.safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()[KEY])


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    "kills, total", [(2, 40), pytest.param(40, 600, marks=pytest.mark.long)], ids=["a few", "many"]
)
@pytest.mark.sampled(every=2)
def test_a_trainer_that_is_killed_resumes_where_it_saved(
    large_step: TrainingStep, tmp_path: Path, kills: int, total: int, wait: bool
) -> None:
    """With kill -9 at random moments: the file is whole each time, and all numbers are those of a run never stopped."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        large_step.save(tmp_path / name / "step.onnx")
    with start(tmp_path / "whole", wait, total) as program:
        assert program.wait(600) == 0
    tensors, wanted = content_of(tmp_path / "whole" / "state.safetensors")
    assert len(wanted["extra"]["losses"]) == total == len(set(wanted["extra"]["losses"]))

    folder, done, torn = tmp_path / "killed", 0, 0
    path, generator = folder / "state.safetensors", random.Random(kills)
    for _ in range(kills):
        # One step less than in the end, as only a run that saves once more removes what killed ones left.
        with start(folder, wait, total - 1) as program:
            time.sleep(generator.uniform(0.01, 0.4))
            program.send_signal(signal.SIGKILL)
        torn += any(entry.name.startswith(".gradfuse-") for entry in folder.iterdir())
        if path.exists():
            _, kept = content_of(path)
            losses = kept["extra"]["losses"]
            assert len(losses) == kept["step_count"] >= done
            assert losses == wanted["extra"]["losses"][: len(losses)]
            done = len(losses)
    if kills > 10:
        # Most of the time a file is being written.
        assert torn > kills / 4
    with start(folder, wait, total) as program:
        assert program.wait(600) == 0
    resumed, kept = content_of(path)
    assert kept == wanted
    assert_same(resumed, tensors)
    assert {entry.name for entry in folder.iterdir()} == {"step.onnx", "step.eval.onnx", path.name}


def test_safetensors_may_be_missing(step: TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = TrainingSession(step)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for wait in (True, False):
        with pytest.raises(GradfuseError, match=r"TrainingSession\.save: safetensors is not installed"):
            session.save(tmp_path / "state.safetensors", wait=wait)
    assert checkpoints.text_of(1, {}, "here") == '{"extra": {}, "step_count": 1}'
