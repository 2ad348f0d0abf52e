"""Checks every model that comes of differentiation; prints how many of onnx's node tests were compared."""

from __future__ import annotations

import functools
import importlib
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from gradfuse import TrainingStep


@pytest.fixture(autouse=True)
def results_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let onnx's checker see every result of `differentiate` and of `build_training_step`."""
    for module, name in (("differentiate", "_differentiated"), ("training", "_built")):
        found = importlib.import_module(f"gradfuse.differentiation.{module}")
        monkeypatch.setattr(found, name, _checked(getattr(found, name)))


def _checked(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def checked(*arguments: Any) -> Any:
        result = plain(*arguments)
        models: list[Any] = [result.model, result.evaluation_model] if isinstance(result, TrainingStep) else [result]
        for model in models:
            inner = getattr(model, "model", model)
            proto = ir.to_proto(inner) if isinstance(inner, ir.Model) else inner
            # An operator of onnxruntime in ONNX's domain is unknown to ONNX.
            if not any(node.op_type == "SimplifiedLayerNormalization" for node in proto.graph.node):
                onnx.checker.check_model(proto, full_check=True)
        return result

    return checked


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
