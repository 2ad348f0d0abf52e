"""What docs/training.md shows works."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from training.models import SHAPES, Mlp, batches

import gradfuse

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_examples_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    module, loss, data = Mlp(), nn.CrossEntropyLoss(), batches(3, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    step = gradfuse.export_training_step(module, loss, data[0], optimizer, dynamic_shapes=SHAPES)
    step.save("step.onnx")
    names = {"module": module, "loss": loss, "batches": data, "batch": data[0], "optimizer": optimizer}
    names |= {"schedule": lambda epoch: 0.1 / (1 + epoch)}
    assert len(EXAMPLES) == 11
    with warnings.catch_warnings():
        # A scaler for CUDA is not enabled where there is none.
        warnings.filterwarnings("ignore", "torch.*GradScaler is enabled, but CUDA is not available")
        for example in EXAMPLES[:-1]:
            exec(example, names)
    session, last = names["session"], names["step"]
    assert isinstance(session, gradfuse.TrainingSession)
    assert isinstance(last, gradfuse.TrainingStep)
    assert session.learning_rate == pytest.approx(1e-3)
    assert "float16" not in {array.dtype.name for array in last.parameters.values()}


def test_the_example_of_a_memory_budget_runs(capsys: pytest.CaptureFixture[str]) -> None:
    # Activations are most of what this step takes, unlike those of a few small layers.
    layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))]
    module, x = nn.Sequential(*layers), torch.randn(256, 8)
    names = {"gradfuse": gradfuse, "module": module, "loss": nn.MSELoss(), "batch": (x, torch.randn(256, 8))}
    exec(EXAMPLES[-1], names | {"optimizer": torch.optim.AdamW(module.parameters())})
    assert "nodes run twice" in capsys.readouterr().out


def test_the_tables_name_every_option_and_input() -> None:
    import inspect

    options = set(re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE))
    known = set(inspect.signature(gradfuse.export_training_step).parameters)
    assert options == known - {"module", "loss", "batch", "dynamic_shapes", "fuse"}
