"""A few of PyTorch's operators go through the runner of `make test-op-db`, and it tells right from wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from op_db import run, samples

from gradfuse import export_training_step

OPERATORS = """
    sin add atan2 fmax copysign softmax log_softmax cumsum prod amax logsumexp norm mm gather index_select scatter_add
    special.log_ndtr nn.functional.gelu nn.functional.softplus nn.functional.layer_norm nn.functional.avg_pool2d
    nn.functional.dropout nn.functional.embedding nn.functional.soft_margin_loss linalg.svdvals linalg.qr
""".split()


@pytest.fixture(autouse=True)
def _one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SAMPLES", 1)


@pytest.fixture(scope="module")
def sample() -> samples.Sample:
    return next(samples.samples_of(samples.operators()["atan2"]))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.sampled(every=2)
def test_operators_are_right(name: str) -> None:
    (one,) = samples.samples_of(samples.operators()[name])
    assert run.outcome(one) == (run.RIGHT, "")


def test_refusals_are_lines() -> None:
    (one,) = samples.samples_of(samples.operators()["to_sparse"])
    kind, why = run.outcome(one)
    assert kind == run.REFUSED
    assert "\n" not in why and "sparse" in why


def test_a_wrong_number_is_seen(sample: samples.Sample) -> None:
    step = export_training_step(sample.module, samples.loss, (sample.inputs, sample.weights), evaluation=False)
    run.compare(step, sample)
    name = step.model.graph.output[1].name
    (maker,) = (node for node in step.model.graph.node if name in node.output)
    maker.output[list(maker.output).index(name)] = "exact"
    step.model.graph.initializer.append(numpy_helper.from_array(np.array(1.0001, np.float32), "share"))
    step.model.graph.node.append(onnx.helper.make_node("Mul", ["exact", "share"], [name]))
    with pytest.raises(AssertionError, match="gradient differs"):
        run.compare(dataclasses.replace(step), sample)


def test_results_are_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    page.write_text("Before.\n<!-- measured -->\n<!-- end -->\nAfter.\n")
    assert run.main(["--results", str(results), "--page", str(page), "sin"]) == 0
    assert json.loads(results.read_text()) == {"sin": [["right", ""]]}
    # The process of an operator takes no longer than it may; the results of the others stay.
    assert run.main(["--results", str(results), "--page", str(page), "--seconds", "0", "cos"]) == 1
    assert json.loads(results.read_text())["sin"] == [["right", ""]]
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n")
    assert "| `sin` | 1 of 1 |  |" in text
    assert "took longer than 0 s" in text
    assert run.main(["nothing"]) == 2
    assert "no operator 'nothing'" in capsys.readouterr().err
