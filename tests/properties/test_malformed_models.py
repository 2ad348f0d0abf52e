"""Malformed models harm nothing: each command does its work, or says in one line what is wrong, soon.

The models are valid ones with up to three things changed (tests/support/malformed.py). What is asked of the
commands: an exit code that is documented, and not that of a bug; one line on standard error where they fail, and no
file; a model that the checker takes where they write one.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import malformed
import onnx
import pytest

from gradfuse import cli

MUTANTS = 200
SLOW_MUTANTS = 5_000
SECONDS = 20
BATCH = 25

COMMANDS = {
    "explain": "explain IN",
    "fuse": "fuse IN OUT --policy all",
    "expand": "expand IN OUT",
    "check": "check IN IN --runs 1",
}


@contextmanager
def _in_time(what: str) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{what} takes more than {SECONDS} seconds of processor time")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _try(seed: int, bases: list[onnx.ModelProto], folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    content = malformed.mutant(rng.choice(bases), rng)
    source, target = folder / "in.onnx", folder / "out.onnx"
    source.write_bytes(content)
    for name, command in COMMANDS.items():
        what = f"{name} of mutant {seed}"
        target.unlink(missing_ok=True)
        capfd.readouterr()
        with _in_time(what):
            code = cli.run(command.replace("IN", str(source)).replace("OUT", str(target)).split())
        errors = capfd.readouterr().err
        assert code in (0, cli.EXIT_BAD_INPUT, cli.EXIT_CHECK_FAILED), f"{what}: exit code {code}: {errors}"
        if code == cli.EXIT_BAD_INPUT:
            assert errors.startswith("gradfuse: ") and errors.count("\n") == 1, f"{what}: {errors}"
        assert target.exists() == (code == 0 and "OUT" in command), what
        assert source.read_bytes() == content, what
        if target.exists() and malformed.is_valid(content):
            onnx.checker.check_model(target)
    target.unlink(missing_ok=True)
    assert [path.name for path in folder.iterdir()] == ["in.onnx"], seed


@pytest.fixture(scope="module")
def bases() -> list[onnx.ModelProto]:
    return malformed.models()


def test_the_models_that_mutants_are_made_of_are_valid(bases: list[onnx.ModelProto]) -> None:
    assert all(malformed.is_valid(base.SerializeToString()) for base in bases)


@pytest.mark.parametrize("start", range(0, MUTANTS, BATCH))
def test_malformed_models(
    start: int, bases: list[onnx.ModelProto], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for seed in range(start, start + BATCH):
        _try(seed, bases, tmp_path, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(MUTANTS, SLOW_MUTANTS, 10 * BATCH))
def test_more_malformed_models(
    start: int, bases: list[onnx.ModelProto], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for seed in range(start, start + 10 * BATCH):
        _try(seed, bases, tmp_path, capfd)
