"""Ranks train as one process with the whole batch; where one is lost the others end, and all go on where they were."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import torch.nn.functional as F
from sample_runs import SAMPLES, loaded
from training.models import assert_trained

PROGRAM = SAMPLES / "data_parallel.py"
data_parallel = loaded("data_parallel")


@pytest.mark.parametrize("shares", [[1], [1, 1], [3, 1, 2], [0, 5, 1, 0], [1, 0]])
def test_every_row_has_one_rank(shares: list[int]) -> None:
    for count in (0, 1, 2, 5, 6, 7, 64):
        rows = np.random.default_rng(count).permutation(count)
        parts = [data_parallel.share_of(rows, shares, rank) for rank in range(len(shares))]
        np.testing.assert_array_equal(np.concatenate(parts), rows)
        for part, share in zip(parts, shares, strict=True):
            assert abs(len(part) - count * share / sum(shares)) <= 1
            assert share or not len(part)


def ports() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Ranks:
    """Processes that are started as on several machines, without torchrun."""

    def __init__(self, count: int, *options: object) -> None:
        common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports())}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), *map(str, options)],
                env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]

    def end(self, seconds: float = 300) -> list[tuple[int, str, str]]:
        """The exit status, stdout and stderr of each."""
        end = time.monotonic() + seconds
        texts = [process.communicate(timeout=max(0.1, end - time.monotonic())) for process in self.processes]
        return [(process.returncode, *text) for process, text in zip(self.processes, texts, strict=True)]


@contextlib.contextmanager
def ranks(count: int, *options: object) -> Iterator[Ranks]:
    running = Ranks(count, *options)
    try:
        yield running
    finally:
        for process in running.processes:
            process.kill()
            process.wait()


def saved(path: Path) -> tuple[list[float], dict[str, Any]]:
    """The losses and the tensors of a file that a session has saved."""
    with safetensors.safe_open(path, "numpy") as file:
        kept = json.loads(file.metadata()["gradfuse.checkpoint"])
        return kept["extra"]["losses"], {name: file.get_tensor(name) for name in file.keys()}


def trained(dtype: torch.dtype, batch_size: int, accumulate: int) -> tuple[list[float], torch.nn.Module]:
    """The same training in PyTorch, in one process: one epoch."""
    images, labels, chosen, _ = data_parallel.digits(0)
    torch.manual_seed(0)
    module = data_parallel.Classifier().to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    rows_of = data_parallel.batches(chosen, batch_size, 0)
    for index, rows in enumerate(rows_of[: len(rows_of) // accumulate * accumulate]):
        loss = F.cross_entropy(module(images[rows].to(dtype)), labels[rows])
        (loss / accumulate).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, module


@pytest.mark.long
@pytest.mark.parametrize(
    "count, accumulate, options",
    [(1, 5, []), (2, 1, []), (4, 3, ["--shares", "4,1,0,2"])],
    ids=["one", "two", "four uneven"],
)
def test_ranks_train_as_one_process_with_the_whole_batch(
    tmp_path: Path, count: int, accumulate: int, options: list[object]
) -> None:
    """Against the same training in PyTorch, in float32 and float64; the last batch has 29 digits."""
    options += ["--epochs", 1, "--batch-size", 128, "--save", tmp_path / "saved", "--checkpoint", tmp_path / "state"]
    options += ["--accumulate", accumulate]
    with ranks(count, *options, "--accuracy", 0) as started:
        results = started.end()
    assert [(status, stderr) for status, _, stderr in results] == [(0, "")] * count
    assert [stdout for _, stdout, _ in results[1:]] == [""] * (count - 1)
    assert not (tmp_path / "state").exists()
    (native, module), (exact, reference) = (trained(dtype, 128, accumulate) for dtype in (torch.float32, torch.float64))
    losses, parameters = saved(tmp_path / "saved")
    assert results[0][1].startswith(f"{count} rank{'s' if count > 1 else ''} over gloo: {len(exact)} steps")
    assert_trained({name: parameters[name] for name in module.state_dict()}, module, reference, len(exact))
    worst = max(abs(a - b) for a, b in zip(native, exact, strict=True))
    assert max(abs(a - b) for a, b in zip(losses, exact, strict=True)) <= 4 * worst


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Any]]:
    """What four ranks give that are never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    with ranks(4, *options(folder)) as started:
        assert [status for status, _, _ in started.end()] == [0] * 4
    return saved(folder / "saved")


def options(folder: Path) -> list[object]:
    files = ["--save", folder / "saved", "--checkpoint", folder / "state"]
    return [*files, "--epochs", 8, "--shares", "1,2,1,1", "--checkpoint-every", 7, "--accuracy", 0.2]


def wait_for(path: Path, started: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert started.poll() is None, started.communicate()
        time.sleep(0.01)


def assert_same(found: tuple[list[float], dict[str, Any]], whole: tuple[list[float], dict[str, Any]]) -> None:
    assert found[0] == whole[0] and found[1].keys() == whole[1].keys()
    for name, array in whole[1].items():
        np.testing.assert_array_equal(found[1][name], array)


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_the_others_end_where_a_rank_is_lost(
    tmp_path: Path, whole: tuple[list[float], dict[str, Any]], lost: int, number: int
) -> None:
    with ranks(4, *options(tmp_path), "--timeout", 15) as started:
        processes = started.processes
        wait_for(tmp_path / "state", processes[0])
        processes[lost].send_signal(number)
        start = time.monotonic()
        others = [process for rank, process in enumerate(processes) if rank != lost]
        for process in others:
            process.wait(120)
        # All of them, with the seconds that the machine may take to let them run.
        assert time.monotonic() - start < 15 + 30
        processes[lost].kill()
        results = started.end()
    for rank, (status, _, stderr) in enumerate(results):
        if rank != lost:
            assert status == 3
            (line,) = [line for line in stderr.splitlines() if not line.startswith("[W")]
            assert line.startswith(
                f"rank {rank} ends: DataParallelSession: another rank has ended or does not answer: "
            )
    assert not (tmp_path / "saved").exists()
    with ranks(4, *options(tmp_path)) as again:
        (status, stdout, _), *_ = again.end()
    assert status == 0 and stdout.startswith("going on after ")
    assert_same(saved(tmp_path / "saved"), whole)


@pytest.mark.long
def test_ctrl_c_at_one_rank_ends_all_after_the_same_step(
    tmp_path: Path, whole: tuple[list[float], dict[str, Any]]
) -> None:
    with ranks(4, *options(tmp_path)) as started:
        wait_for(tmp_path / "state", started.processes[0])
        started.processes[3].send_signal(signal.SIGINT)
        results = started.end()
    assert [(status, stderr) for status, _, stderr in results] == [(130, "")] * 4
    assert "run the same command again to go on" in results[0][1]
    with ranks(4, *options(tmp_path)) as again:
        assert [status for status, _, _ in again.end()] == [0] * 4
    assert_same(saved(tmp_path / "saved"), whole)
    with ranks(2, *options(tmp_path)) as wrong:
        assert all(
            status == 2 and "expected 2 whole numbers, one a rank" in stderr for status, _, stderr in wrong.end()
        )


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="ascii")
    return [int(child) for child in children.split()]


@pytest.mark.long
def test_torchrun_starts_lost_ranks_again(tmp_path: Path, whole: tuple[list[float], dict[str, Any]]) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--max-restarts", "1"]
    program = [sys.executable, *command, str(PROGRAM), *map(str, options(tmp_path))]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        wait_for(tmp_path / "state", launcher)
        workers = workers_of(launcher)
        assert len(workers) == 4
        os.kill(workers[1], signal.SIGKILL)
        stdout, stderr = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, stderr
    assert "going on after " in stdout
    assert_same(saved(tmp_path / "saved"), whole)
