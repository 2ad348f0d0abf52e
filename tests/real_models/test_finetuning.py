"""The sample that trains a model of transformers goes on where it stopped, and writes what transformers loads."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_runs import numbers, sample
from sklearn.datasets import load_digits

import gradfuse

pytestmark = pytest.mark.models


def test_a_stopped_run_goes_on_and_is_loaded_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()

    def train(folder: str, status: int = 0) -> str:
        return sample("finetune_transformers", "--epochs", 2, "--folder", tmp_path / folder, status=status)

    whole = train("whole", status=1)
    assert "test accuracy is" in whole
    step = gradfuse.TrainingSession.step

    def stopped(self: gradfuse.TrainingSession, *batch: Any) -> float:
        if self.step_count == 60:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *batch)

    with monkeypatch.context() as patched:
        patched.setattr(gradfuse.TrainingSession, "step", stopped)
        assert "stopped after 61 of 90 steps" in train("parts", status=130)
    rest = train("parts", status=1)
    assert "going on after 61 steps" in rest
    assert re.findall(r"^epoch 2.*", rest, re.MULTILINE) == re.findall(r"^epoch 2.*", whole, re.MULTILINE)

    loaded = [transformers.ViTForImageClassification.from_pretrained(tmp_path / name) for name in ("whole", "parts")]
    for one, other in zip(*(model.state_dict().values() for model in loaded), strict=True):
        assert torch.equal(one, other)
    digits = load_digits()
    pictures, labels = torch.from_numpy(digits.images[:, None]).float() / 16, torch.from_numpy(digits.target)
    (written,) = numbers("is written, test accuracy #%", whole)
    with torch.no_grad():
        share = float((loaded[0].eval()(pictures).logits.argmax(1) == labels).float().mean())
    # Of all digits, not only those of the test.
    assert abs(100 * share - written) < 10


def test_a_pretrained_language_model_goes_on_with_its_own_tokens(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["to be or not to be, that is the question"], vocab_size=300, show_progress=False)
    (tmp_path / "small").mkdir()
    tokenizer.save(str(tmp_path / "small" / "tokenizer.json"))
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "small" / "tokenizer.json")).save_pretrained(
        tmp_path / "small"
    )
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "small")
    options = ("--model", tmp_path / "small", "--steps", 60, "--context", 32, "--rate", 1e-2, "--loss", 4.5)
    text = sample("finetune_gpt2", *options, "--folder", tmp_path / "trained")
    (before,) = numbers("loss on the text left out before training: #", text)
    (after,) = numbers("loss on the text left out: #; memory", text)
    assert after < before - 0.8
    assert abs(before - 5.7) < 0.2  # log 300: nothing is known yet

    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "trained")
    ids = torch.tensor([tokenizer.encode("statement " * 20).ids[:32]])
    with torch.no_grad():
        assert float(loaded.eval()(ids, labels=ids).loss) < before
