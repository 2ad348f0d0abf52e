"""Writes the tables of operators in README.md and docs/, between their markers: `operator_tables.py [--check]`.

What stands between `<!-- operators: NAME -->` and `<!-- operators: end -->` on any of these pages is generated; NAME is
one of the functions of TABLES. With --check nothing is written, and a page that is not up to date is an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from operator_reference import reference

from gradfuse.custom_ops import DOMAIN, OPS

ROOT = Path(__file__).resolve().parents[1]
_GENERATED = re.compile(r"(<!-- operators: (?!end )(\w+) -->\n).*?(?=<!-- operators: end -->)", re.DOTALL)


def _summary() -> str:
    rows = [f"| `{op.name}` | {op.summary} | {op.counterpart} |" for op in OPS.values()]
    return "\n".join(["| operator | computes the gradient of | PyTorch's counterpart |", "|---|---|---|", *rows])


def _schemas() -> str:
    return "\n".join(["```text", *(f"{DOMAIN}::{op.stem}{op.torch_schema}" for op in OPS.values()), "```"])


TABLES: dict[str, Callable[[], str]] = {"summary": _summary, "schemas": _schemas, "reference": reference}


def pages() -> Iterator[Path]:
    """The pages that may have tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def updated(page: str) -> str:
    """The text of a page with the present operators between its markers."""
    return _GENERATED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n", page)


def tables_in(page: str) -> set[str]:
    """The names of the tables that a page has."""
    return {name for _, name in _GENERATED.findall(page)}


def main() -> int:
    stale = [path for path in pages() if updated(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")]
    if sys.argv[1:] == ["--check"]:
        for path in stale:
            print(f"{path} is not up to date: run {Path(__file__).name}", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
