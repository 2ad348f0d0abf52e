"""Every script of benchmarks/ starts."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path.name for path in (ROOT / "benchmarks").glob("*.py") if "ArgumentParser(" in path.read_text(encoding="utf-8")
)


def _print_help(script: str, output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    path = ROOT / "benchmarks" / script
    # As python benchmarks/... has it: its own folder, and none that pytest has put there.
    installed = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [str(path.parent), *installed]
    sys.argv = [str(path), "--help"]
    runpy.run_path(str(path), run_name="__main__")


def test_each_prints_its_help(tmp_path: Path) -> None:
    assert len(SCRIPTS) >= 7
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "onnxruntime", "onnxscript"])
    processes = {name: context.Process(target=_print_help, args=(name, str(tmp_path / name))) for name in SCRIPTS}
    for name, process in processes.items():
        process.start()
        process.join()
        printed = (tmp_path / name).read_text(encoding="utf-8")
        assert process.exitcode == 0, printed
        assert f"usage: {name}" in printed
