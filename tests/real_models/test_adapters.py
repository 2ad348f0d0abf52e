"""Adapters of peft that a session has trained are loaded by peft, and give the outputs of the session."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from real_models.adapter_cases import ADAPTED, adapted
from real_models.step_cases import transformer
from torch import Tensor

from gradfuse import TrainingSession, export_training_step
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.models

AXES = {0: "batch", 1: "length"}


def loss(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), labels.flatten())


@pytest.mark.parametrize("name", ADAPTED)
def test_trained_adapters_load_in_peft(name: str, tmp_path: Path) -> None:
    import peft

    torch.manual_seed(0)
    settings, _, adapters = ADAPTED[name]
    words = "CausalLM" in name or "LMHead" in name
    model: Any = adapted(name, settings, adapters)().train()
    base = {key: value.clone() for key, value in model.state_dict().items()}
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    tokens = torch.randint(3, 40, (4, 9))
    batch = (tokens[:, :-1], tokens[:, 1:]) if words else (tokens, torch.randint(0, 5, (4,)))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)
    shapes = (AXES, AXES if words else {0: "batch"})
    step = export_training_step(model, loss, batch, optimizer, dynamic_shapes=shapes)
    assert set(step.parameters) == trained

    session = TrainingSession(step)
    losses = [session.step(*batch) for _ in range(20)]
    assert losses[-1] < losses[0]
    after = session.state_dict()
    assert set(after) == set(base)
    changed = {key for key, array in after.items() if not np.array_equal(array, base[key].numpy())}
    assert changed == {key for key in base if key in trained}

    model.load_state_dict({key: torch.from_numpy(array) for key, array in after.items()})
    model.save_pretrained(tmp_path)
    fresh: Any = transformer(name, **settings)()
    names = {key: key.replace(".base_layer", "").replace(".original_module", "") for key in base}
    prefix = "base_model.model."
    originals = {names[key].removeprefix(prefix): value for key, value in base.items()}
    fresh.load_state_dict({key: originals[key] for key in fresh.state_dict()})
    loaded = peft.PeftModel.from_pretrained(fresh, str(tmp_path)).eval()
    other = torch.randint(3, 40, (3, 11))
    with torch.no_grad():
        native = loaded(other).logits.numpy()
        exact = loaded.double()(other).logits.numpy()
    # A logit is what is left of larger terms of both signs.
    terms = 8 * np.abs(exact).max()
    assert_gradients_close(session.evaluate(other), native, exact, np.dtype(np.float32), terms=terms)


def test_the_example_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft
    import safetensors.torch

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    page = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
    _, example = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {}
    exec(example, found)
    assert found["losses"][-1] < found["losses"][0]
    stored = safetensors.torch.load_file("adapter/adapter_model.safetensors")
    for name, tensor in peft.get_peft_model_state_dict(found["model"]).items():
        assert torch.equal(stored.pop(name), tensor)
    assert not stored
