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


def _print_help(scripts: list[str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    folder = ROOT / "benchmarks"
    # As python benchmarks/... has it: its own folder, and none that pytest has put there.
    installed = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [str(folder), *installed]
    for script in scripts:
        sys.argv = [str(folder / script), "--help"]
        try:
            runpy.run_path(str(folder / script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise


def test_each_prints_its_help(tmp_path: Path) -> None:
    assert len(SCRIPTS) >= 7
    output = tmp_path / "output"
    process = multiprocessing.get_context("spawn").Process(target=_print_help, args=(SCRIPTS, str(output)))
    process.start()
    process.join()
    printed = output.read_text(encoding="utf-8")
    assert process.exitcode == 0, printed
    assert [name for name in SCRIPTS if f"usage: {name}" not in printed] == [], printed
