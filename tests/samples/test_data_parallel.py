"""Ranks train as one process with the whole batch; where one is lost the others end, and all go on where they were."""

from __future__ import annotations

import contextlib
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


def trained(dtype: torch.dtype, batch_size: int, epochs: int) -> tuple[list[float], torch.nn.Module]:
    """The same training in PyTorch, in one process."""
    images, labels, chosen, _ = data_parallel.digits(0)
    torch.manual_seed(0)
    module = data_parallel.Classifier().to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        for rows in data_parallel.batches(chosen, batch_size, epoch):
            loss = F.cross_entropy(module(images[rows].to(dtype)), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses, module


@pytest.mark.long
@pytest.mark.parametrize(
    "count, options",
    [(1, ["--accumulate", 5]), (2, []), (4, ["--shares", "4,1,0,2", "--accumulate", 3])],
    ids=["one", "two", "four uneven"],
)
def test_ranks_train_as_one_process_with_the_whole_batch(tmp_path: Path, count: int, options: list[object]) -> None:
    """Against the same training in PyTorch, in float32 and float64; the last batch has 29 digits."""
    options += ["--epochs", 1, "--batch-size", 128, "--save", tmp_path / "saved.pt", "--checkpoint", tmp_path / "state"]
    with ranks(count, *options, "--accuracy", 0.2) as started:
        results = started.end()
    assert [(status, stderr) for status, _, stderr in results] == [(0, "")] * count
    assert results[0][1].startswith(f"{count} rank{'s' if count > 1 else ''} over gloo: 12 steps")
    assert [stdout for _, stdout, _ in results[1:]] == [""] * (count - 1)
    assert not (tmp_path / "state").exists()
    saved = torch.load(tmp_path / "saved.pt")
    (native, module), (exact, reference) = trained(torch.float32, 128, 1), trained(torch.float64, 128, 1)
    parameters = {name: tensor.numpy() for name, tensor in saved["parameters"].items()}
    assert_trained(parameters, module, reference, len(exact))
    worst = max(abs(a - b) for a, b in zip(native, exact, strict=True))
    assert max(abs(a - b) for a, b in zip(saved["losses"], exact, strict=True)) <= 4 * worst


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four ranks give that are never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    with ranks(4, *options(folder)) as started:
        assert [status for status, _, _ in started.end()] == [0] * 4
    content: dict[str, Any] = torch.load(folder / "saved.pt")
    return content


def options(folder: Path) -> list[object]:
    files = ["--save", folder / "saved.pt", "--checkpoint", folder / "state"]
    return [*files, "--epochs", 8, "--shares", "1,2,1,1", "--checkpoint-every", 7, "--accuracy", 0.2]


def wait_for(path: Path, started: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert started.poll() is None, started.communicate()
        time.sleep(0.01)


def assert_same(saved: dict[str, Any], whole: dict[str, Any]) -> None:
    assert saved["losses"] == whole["losses"]
    for name, tensor in whole["parameters"].items():
        torch.testing.assert_close(saved["parameters"][name], tensor, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_the_others_end_where_a_rank_is_lost(tmp_path: Path, whole: dict[str, Any], lost: int, number: int) -> None:
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
            assert line.startswith(f"rank {rank} ends: another rank is lost or silent (")
    assert not (tmp_path / "saved.pt").exists()
    with ranks(4, *options(tmp_path)) as again:
        (status, stdout, _), *_ = again.end()
    assert status == 0 and stdout.startswith("going on after ")
    assert_same(torch.load(tmp_path / "saved.pt"), whole)


@pytest.mark.long
def test_ctrl_c_at_one_rank_ends_all_after_the_same_step(tmp_path: Path, whole: dict[str, Any]) -> None:
    with ranks(4, *options(tmp_path)) as started:
        wait_for(tmp_path / "state", started.processes[0])
        started.processes[3].send_signal(signal.SIGINT)
        results = started.end()
    assert [(status, stderr) for status, _, stderr in results] == [(130, "")] * 4
    assert "run the same command again to go on" in results[0][1]
    with ranks(4, *options(tmp_path)) as again:
        assert [status for status, _, _ in again.end()] == [0] * 4
    assert_same(torch.load(tmp_path / "saved.pt"), whole)
    with ranks(2, *options(tmp_path)) as wrong:
        assert all(
            status == 2 and "expected 2 whole numbers, one a rank" in stderr for status, _, stderr in wrong.end()
        )


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="ascii")
    return [int(child) for child in children.split()]


@pytest.mark.long
def test_torchrun_starts_lost_ranks_again(tmp_path: Path, whole: dict[str, Any]) -> None:
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
    assert_same(torch.load(tmp_path / "saved.pt"), whole)
