"""Prints how many of onnx's node tests were compared, when all of them ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the share, and the operators with cases that are not compared."""
    if not config.getoption("--node-tests-share", default=False):
        return
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        found = dict(getattr(report, "user_properties", ()))
        if report.when == "call" and "operator" in found:
            outcomes[found["operator"]][found.get("outcome", "failed")] += 1
    total: Counter[str] = Counter()
    for counts in outcomes.values():
        total += counts
    whole = sum(1 for counts in outcomes.values() if set(counts) == {"compared"})
    terminalreporter.section("onnx's node tests with a float derivative")
    terminalreporter.write_line(f"{total.total()} cases of {len(outcomes)} operators; of {whole} operators all agree")
    for outcome, count in total.most_common():
        terminalreporter.write_line(f"{count:5} {outcome}")
    for operator, counts in sorted(outcomes.items()):
        rest = {outcome: count for outcome, count in counts.items() if outcome != "compared"}
        if rest:
            listed = ", ".join(f"{count} {outcome}" for outcome, count in rest.items())
            terminalreporter.write_line(f"{operator}: {counts['compared']} compared, {listed}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-differentiation`."""
    parser.addoption("--node-tests-share", action="store_true", help="print how many of onnx's node tests agree")
