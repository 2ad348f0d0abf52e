"""Ranks as processes of this machine: each runs a function of a file of tests, and leaves what it returns in a file."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SECONDS = 240


class Ranks:
    """Processes that call `function(rank, argument)`, in a gloo group.

    Args:
        function: a function of a module in this folder.
        folder: an empty folder for what they exchange.
        argument: what each gets, which pickle can hold.
        count: how many there are.
    """

    def __init__(self, function: Callable[[int, Any], Any], folder: Path, argument: Any, count: int = 2) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        (folder / "argument").write_bytes(pickle.dumps(argument))
        module = Path(function.__code__.co_filename).stem
        command = [sys.executable, __file__, module, function.__name__, str(folder), str(count)]
        # One thread each: what is compared bit by bit must not depend on their number.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(count)}
        self.processes = [
            subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(count)
        ]

    def results(self, expected: Sequence[int] | None = None) -> list[Any]:
        """Return what each function returned; None of a rank whose exit status is another one, as expected."""
        try:
            errors = [process.communicate(timeout=SECONDS)[1] for process in self.processes]
        finally:
            self.end()
        statuses = [process.returncode for process in self.processes]
        assert statuses == list(expected or [0] * len(statuses)), "\n".join(errors)
        files = [self._folder / f"result{rank}" for rank in range(len(statuses))]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]

    def end(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def main(module: str, name: str, folder: str, count: int, rank: int) -> None:
    import torch
    import torch.distributed as dist

    tests = Path(__file__).parents[1]
    sys.path.extend([str(tests), str(tests / "support")])
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(f"distributed.{module}"), name)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    result = function(rank, pickle.loads(Path(folder, "argument").read_bytes()))
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
    # A group whose other ranks have ended must not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
