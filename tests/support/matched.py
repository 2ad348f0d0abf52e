"""What fuse matches in each graph of tests/corpus and tests/findings, as `matched.json` beside the graphs keeps it.

`make matched` prints the table, and writes the file anew.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

from gradfuse import GradfuseError, fuse
from gradfuse.passes.matching import Policy

TESTS = Path(__file__).parents[1]
LIST = TESTS / "corpus" / "matched.json"
POLICIES: tuple[Policy, ...] = ("all", "profitable")

Matched = dict[str, dict[str, int]]
"""For each policy how often each operator was fused, and by which rule."""


def graphs() -> dict[str, Path]:
    """The files by their names in the list."""
    found = [path for folder in ("corpus", "findings") for path in (TESTS / folder).rglob("*.onnx")]
    return {str(path.relative_to(TESTS).with_suffix("")): path for path in sorted(found)}


def matched(path: Path) -> Matched:
    """What fuse matches in a file; nothing in one that it refuses."""
    result: Matched = {}
    for policy in POLICIES:
        try:
            fusions = fuse(path, policy=policy, bodies=False).report.fusions
        except GradfuseError:
            fusions = []
        counts = Counter(f"{fusion.op} ({fusion.rule})" for fusion in fusions)
        result[policy] = dict(sorted(counts.items()))
    return result


def known() -> dict[str, Matched]:
    content: dict[str, Matched] = json.loads(LIST.read_text())
    return content


def main() -> None:
    logging.disable()
    found = {name: matched(path) for name, path in graphs().items()}
    width = max(map(len, found))
    for name, policies in found.items():
        everything, profitable = (policies[policy] for policy in POLICIES)
        entries = [
            f"{count} {what}" + ("" if profitable.get(what) == count else f", {profitable.get(what, 0)} by default")
            for what, count in everything.items()
        ]
        print(name.ljust(width), "; ".join(entries) or "-")
    LIST.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
