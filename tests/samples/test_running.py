"""What the long samples share: they go on after Ctrl-C as if they had never stopped, and draw their losses."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sample_runs import SAMPLES, loaded, run
from small_models import forward

import gradfuse

running = loaded("running")
STEPS = 12
RNG = np.random.default_rng(0)
BATCHES = [(RNG.standard_normal((6, 4)).astype(np.float32), RNG.integers(0, 5, 6)) for _ in range(STEPS)]


@pytest.fixture(scope="module")
def step() -> gradfuse.TrainingStep:
    return gradfuse.build_training_step(forward(), "cross_entropy", optimizer=gradfuse.optimizers.AdamW(lr=0.1))


def train(step: gradfuse.TrainingStep, path: Path, signals: dict[int, int], rate: float = 0.1) -> list[float]:
    """Train; some steps send a signal to this process."""
    session, console = gradfuse.TrainingSession(step), Console(file=io.StringIO())
    training = running.Training(session, STEPS, console, path, {"rate": rate})
    for index in training:
        if index in signals:
            os.kill(os.getpid(), signals[index])
        training.losses.append(session.step(*BATCHES[index]))
    return list(training.losses)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_training_with_a_checkpoint(
    step: gradfuse.TrainingStep, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(step, tmp_path / "whole", {})
    assert len(whole) == STEPS and not (tmp_path / "whole").exists()
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    path = tmp_path / "folder" / "state.safetensors"
    for at, done in ((0, 1), (4, 5), (STEPS - 1, STEPS)):
        with pytest.raises(SystemExit) as stopped:
            train(step, path, {at: number})
        assert stopped.value.code == 130
        assert len(gradfuse.TrainingSession(step).load(path)["losses"]) == done
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert train(step, path, {}) == whole


def test_a_second_ctrl_c_ends_it_at_once(step: gradfuse.TrainingStep, tmp_path: Path) -> None:
    session, console = gradfuse.TrainingSession(step), Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        for _ in running.Training(session, STEPS, console, tmp_path / "state", {}):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
    assert not (tmp_path / "state").exists()


def test_a_killed_run_has_a_recent_checkpoint(
    step: gradfuse.TrainingStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    whole, path = train(step, tmp_path / "whole", {}), tmp_path / "state"
    session, console = gradfuse.TrainingSession(step), Console(file=io.StringIO())
    training = running.Training(session, STEPS, console, path, {"rate": 0.1})
    with pytest.raises(ZeroDivisionError):
        for index in training:
            training.losses.append(session.step(*BATCHES[index]))
            if index == 6:
                raise ZeroDivisionError
    session.wait()
    assert len(gradfuse.TrainingSession(step).load(path)["losses"]) == 6
    assert train(step, path, {}) == whole


def test_a_checkpoint_of_another_run_is_refused(step: gradfuse.TrainingStep, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with pytest.raises(SystemExit):
        train(step, path, {3: signal.SIGINT})
    content = path.read_bytes()
    for damage, rate in ((content, 0.2), (content[:-1], 0.1), (b"", 0.1)):
        path.write_bytes(damage)
        with pytest.raises(SystemExit) as refused:
            train(step, path, {}, rate)
        assert refused.value.code == 2
        assert path.read_bytes() == damage


def test_losses_are_drawn_from_the_first_to_the_last() -> None:
    assert running.plot([4.0, 3.0, 2.0, 0.5], width=10, height=8).splitlines() == [
        "  4 |*",
        "    |",
        "    | *",
        "    |",
        "    |  *",
        "    |",
        "    |",
        "0.5 |   *",
        "    +----",
        "loss  1  4 steps",
    ]
    lines = running.plot(np.linspace(9, 1, 1000).tolist(), width=20, height=5).splitlines()
    # Each column has one mark, and they fall.
    marks = [[row for row in range(5) if lines[row].split("|")[1].ljust(20)[column] == "*"] for column in range(20)]
    assert all(len(rows) == 1 for rows in marks) and marks == sorted(marks)
    assert lines[-1].endswith("1000 steps")
    assert max(len(line) for line in running.plot(np.linspace(9, 1, 1000).tolist()).splitlines()) < 80
    assert running.plot([1.0]).count("*") == 1
    assert running.plot([2.0, 2.0]).count("*") == 2
    assert running.plot([float("nan"), 1.0, float("inf"), 0.0]).count("*") == 2
    assert running.plot([float("nan")]) == "no finite loss to plot"


SMALL = ["--batch-size", 8, "--context", 16, "--width", 16, "--heads", 2, "--blocks", 1, "--perplexity", 96]


def stop_in_training(options: list[object], number: int) -> tuple[int, str]:
    """Run a sample, and send it a signal once it trains: return its exit status and output."""
    command = [sys.executable, *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        caught = 0
        # It takes SIGTERM while it trains.
        while not caught >> (signal.SIGTERM - 1) & 1:
            assert program.poll() is None
            status = Path(f"/proc/{program.pid}/status").read_text(encoding="ascii")
            caught = int(re.findall(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[0], 16)
            time.sleep(0.01)
        time.sleep(1)
        program.send_signal(number)
        output, _ = program.communicate()
    return program.returncode, output


@pytest.mark.long
def test_a_gpt_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Interrupted, then killed: its losses, text and perplexity are those of a run that never stopped."""
    options = [SAMPLES / "tiny_gpt.py", *SMALL, "--letters", 40, "--steps", 3000]
    whole = run(*options, "--checkpoint", tmp_path / "whole")
    path = tmp_path / "state"
    options += ["--checkpoint", path]
    status, output = stop_in_training(options, signal.SIGINT)
    assert status == 130 and "run the same command again to go on" in output
    content = path.read_bytes()
    status, _ = stop_in_training(options, signal.SIGKILL)
    assert status == -signal.SIGKILL and path.read_bytes() == content
    rest = run(*options)
    (done,) = re.findall(r"^training: going on after (\d+) steps$", rest, re.MULTILINE)
    assert 0 < int(done) < 3000
    assert not path.exists()
    loss = re.compile(r"loss \d+\.\d+$|^perplexity.*$|^  .*$|^ *\d.*\|.*$", re.MULTILINE)
    assert loss.findall(whole) == loss.findall(rest) and "perplexity" in whole
