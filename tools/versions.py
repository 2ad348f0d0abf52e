"""Tests gradfuse with old and new versions of what it depends on, each in an environment of its own.

    python tools/versions.py WHEEL [--only PATTERN] [--page PAGE]

The tests are those of `tests/installed`, which need no PyTorch. `--page` writes the table of docs/support.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import wheels
from fetch_headers import FetchError
from wheels import WheelError

BEGIN, END = "<!-- tested versions -->", "<!-- end of tested versions -->"
NAMES = ("onnxruntime", "onnx", "onnx-ir", "ml_dtypes", "numpy")
# All that pyproject.toml names as the oldest is in the first; each later onnxruntime is beside other versions of the
# rest. numpy 1.26 has wheels up to Python 3.12, and ml_dtypes 0.6 asks for numpy 2.
OLDEST = ("1.18.0", "1.19.0", "1.1.0", "0.5.0", "1.26.0")
MATRIX = (
    ("3.10", *OLDEST),
    ("3.12", "1.18.1", "1.23.2", "1.1.0", "0.5.4", "1.26.4"),
    ("3.11", "1.19.2", "1.19.1", "1.1.0", "0.5.1", "2.0.2"),
    ("3.11", "1.20.1", "1.20.1", "1.1.0", "0.5.1", "2.1.3"),
    ("3.12", "1.21.1", "1.21.0", "1.1.0", "0.5.1", "2.2.6"),
    ("3.10", "1.22.1", "1.21.0", "1.1.0", "0.5.3", "2.2.6"),
    ("3.10", "1.23.2", "1.22.0", "1.1.0", "0.5.4", "2.2.6"),
    ("3.11", "1.24.4", "1.23.2", "1.1.0", "0.5.4", "2.3.5"),
    ("3.12", "1.25.1", "1.23.2", "1.1.0", "0.5.4", "2.4.6"),
    ("3.13", "1.26.0", "1.22.0", "1.1.0", "0.5.4", "2.4.6"),
    ("3.13", "1.27.0", "1.23.2", "1.1.0", "0.6.0", "2.4.6"),
    ("3.11", "1.28.0", "1.23.2", "1.1.0", "0.6.0", "2.4.6"),
    ("3.12", "1.29.0", "1.23.2", "1.1.0", "0.6.0", "2.4.6"),
    ("3.13", "1.30.0", "1.23.2", "1.1.0", "0.6.0", "2.4.6"),
    ("3.14", "1.31.1", "1.23.2", "1.1.0", "0.6.0", "2.4.6"),
    ("3.11", "1.32.0", "1.23.2", "1.1.0", "0.6.0", "2.4.6"),
)


def test(row: Sequence[str], python: Path, wheel: Path) -> bool:
    """Whether the tests pass with the versions of a row."""
    pins = [f"{name}=={version}" for name, version in zip(NAMES, row[1:], strict=True)]
    try:
        inside = wheels.environment(f"versions-{row[0]}-{row[1]}", python, wheel, *pins)
        wheels.pytest(inside, {}, "test_installation.py")
    except WheelError as error:
        print(f"versions.py: {error}", file=sys.stderr)
        return False
    return True


def write(page: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write the table between its two comments."""
    lines = [f"| {' | '.join(cells)} |" for cells in (("Python", *NAMES), ["---"] * 6, *rows)]
    text = page.read_text(encoding="utf-8")
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text("\n".join([text[:before], "", *lines, "", text[after:]]), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="versions of onnxruntime, as in '1.2*'")
    parser.add_argument("--page", type=Path)
    given = parser.parse_args(arguments)
    pythons = wheels.pythons()
    rows = [row for row in MATRIX if fnmatch.fnmatch(row[1], given.only)]
    missing = sorted({row[0] for row in rows} - set(pythons))
    passed = []
    for row in rows:
        told = ", ".join(f"{name} {version}" for name, version in zip(("Python", *NAMES), row, strict=True))
        print(told, flush=True)
        if row[0] in pythons and test(row, pythons[row[0]], given.wheel.resolve()):
            passed.append(row)
    if given.page:
        write(given.page, passed)
    failed = [row[1] for row in rows if row not in passed]
    if failed:
        reason = f" (there is no Python {', '.join(missing)})" if missing else ""
        print(f"versions.py: not passed with onnxruntime {', '.join(failed)}{reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (WheelError, FetchError, subprocess.SubprocessError) as error:
        sys.exit(f"versions.py: {error}")
