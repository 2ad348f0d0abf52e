"""The samples work at a small size, and say by their exit status whether they reached what is wanted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file
from sample_runs import SAMPLES, loaded, numbers, run, sample

CORPUS = Path(__file__).parents[1] / "corpus"


def test_the_page_names_every_sample() -> None:
    text = (SAMPLES.parent / "docs" / "samples.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `samples/([\w.]+)/?` \|", text, re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in SAMPLES.iterdir() if path.name != "__pycache__")


@pytest.mark.long
def test_speech_is_recognised(tmp_path: Path) -> None:
    options = ["--utterances", 192, "--test", 12, "--epochs", 10, "--batch-size", 8, "--width", 32, "--rate", 0.006]
    output = sample("ctc_speech", *options, "--error-rate", 0.6, "--checkpoint", tmp_path / "state")
    assert re.search(r"^exported in .*, with .*\bCtcLoss, CtcLossBackward\b", output, re.MULTILINE)
    first, last = numbers("loss # in the first, # in the last", output)
    assert last < first / 2
    (rate,) = numbers("label error rate #% of", output)
    assert rate <= 60


def test_labels_are_counted_and_decoded_right() -> None:
    speech = loaded("ctc_speech")
    words = [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("flaw", "lawn", 2), ("same", "same", 0)]
    for one, other, distance in words:
        assert speech.edit_distance([*map(ord, one)], [*map(ord, other)]) == distance
    path = np.eye(4)[[0, 1, 1, 0, 1, 3, 3, 2]]
    assert speech.decode(path, 7) == [1, 1, 3]
    # Frames of silence that pad the shorter ones have no label, and do not count.
    data = [speech.Utterance(np.ones((n, 2), np.float32), np.arange(1, k)) for n, k in ((7, 4), (4, 2))]
    frames, (labels, steps, lengths) = speech.Scale(np.ones(2, np.float32), np.ones(2, np.float32)).batch(data)
    assert frames.shape == (2, 7, 2)
    assert (labels.tolist(), steps.tolist(), lengths.tolist()) == ([[1, 2, 3], [1, 0, 0]], [4, 2], [3, 1])


@pytest.mark.long
def test_a_gpt_learns_letters(tmp_path: Path) -> None:
    options = ["--steps", 40, "--batch-size", 8, "--context", 16, "--width", 16, "--heads", 2, "--blocks", 1]
    options += ["--checkpoint", tmp_path / "state"]
    output = sample("tiny_gpt", *options, "--rate", 0.02, "--letters", 20, "--perplexity", 1, status=1)
    assert re.findall(r"^  (\w+): 1 fused$", output, re.MULTILINE) == [
        "CrossEntropyLossGrad",
        "ScaledMaskedSoftmaxBackward",
    ]
    before, after = numbers("left out: # before training, # after", output)
    # Guessing has 96, and how often each letter comes about 30.
    assert 90 < before < 102
    assert after < 32
    assert "  The statement " in output
    assert f"perplexity is {after:.2f}; expected at most 1.00" in output


@pytest.mark.long
def test_a_mixture_of_experts_is_fused_and_learns() -> None:
    output = sample("moe", "--epochs", 4, "--width", 16, "--experts", 4, "--rate", 0.01, "--accuracy", 0.6)
    assert re.search(r"^  GroupedBiasAddGrad +\w+ +replaces", output, re.MULTILINE)
    counts = numbers("of 1440: #, #, #, #", output)
    assert sum(counts) == 1440
    assert numbers("test accuracy #%", output)[0] >= 60


@pytest.mark.long
@pytest.mark.parametrize(
    "case, operators",
    [
        (
            "torch_export_fb/gpt_block_ce_dyn",
            {
                "CrossEntropyLossGrad",
                "EmbeddingDenseBackward",
                "GeluBackward",
                "LayerNormBackward",
                "ScaledMaskedSoftmaxBackward",
            },
        ),
        ("jax2onnx_gemmfix/ce_onehot_smooth", {"CrossEntropyLossGrad"}),
    ],
)
def test_models_of_any_producer_are_optimized(case: str, operators: set[str], tmp_path: Path) -> None:
    source, target = CORPUS / f"{case}.onnx", tmp_path / "optimized.onnx"
    output = sample("optimize_model", source, target, "--runs", 1)
    assert set(re.findall(r"^  (\w+) replaces", output, re.MULTILINE)) == operators
    model = onnx.load(target)
    onnx.checker.check_model(model)
    assert {node.op_type for node in model.graph.node if node.domain == "aclnn"} == operators
    assert {function.name for function in model.functions} == operators
    before, after = numbers("# nodes before, # after", output)
    assert len(model.graph.node) == after < before == len(onnx.load(source).graph.node)


# What is imported behind this fails as if it were not installed.
WITHOUT_TORCH = (
    "import runpy, sys; sys.modules.update(dict.fromkeys(('torch', 'sklearn', 'onnxscript'))); "
    "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


WITHOUT_INSTALLED_TORCH = """
import os, runpy, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnxscript"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoTorch())
sys.argv[:] = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_an_onnx_file_is_finetuned_without_torch(tmp_path: Path) -> None:
    program = SAMPLES / "finetune_onnx.py"
    output = run("-c", WITHOUT_INSTALLED_TORCH, program, "--folder", tmp_path, "--frozen", "layer1.bias")
    assert "training layer0.weight, layer0.bias, layer1.weight\n" in output
    (first,), (swapped,) = numbers("file reads #%", output), numbers("colours it reads #%", output)
    (after,) = numbers("onnx reads #%", output)
    assert swapped < 50 < 90 < first and after >= 93
    before, trained = (onnx.load(tmp_path / f"digits_{name}.onnx") for name in ("classifier", "finetuned"))
    assert [node.op_type for node in trained.graph.node] == [node.op_type for node in before.graph.node]
    changed = [a.name for a, b in zip(before.graph.initializer, trained.graph.initializer, strict=True) if a != b]
    assert changed == ["layer0.weight", "layer0.bias", "layer1.weight"]


@pytest.mark.long
def test_a_file_that_is_not_trained_enough_is_a_failure(tmp_path: Path) -> None:
    output = sample("finetune_onnx", "--folder", tmp_path, "--epochs", 1, "--rate", 1e-6, status=1)
    assert "expected at least 93%" in output


@pytest.mark.long
def test_adapters_of_an_int4_gpt_are_trained_and_served_without_torch(tmp_path: Path) -> None:
    sizes = ["--width", 32, "--heads", 2, "--blocks", 1, "--context", 16, "--batch-size", 8, "--rank", 2]
    options = [*sizes, "--base-steps", 30, "--steps", 20, "--folder", tmp_path]
    output = run("-c", WITHOUT_INSTALLED_TORCH, SAMPLES / "lora_int4.py", *options, "--wanted", 0.001)
    before, after = numbers("left out: # before, # after", output)
    (served,) = numbers("adapter, the loss is #", output)
    assert after < before and served == after
    assert "without the adapter, outputs are those of the int4 model" in output
    (count,) = numbers("# numbers of adapters", output)
    stored = load_file(tmp_path / "source_code_peft" / "adapter_model.safetensors")
    assert count == sum(array.size for array in stored.values())
    assert "base_model.model.blocks.0.qkv.lora_A.weight" in stored


@pytest.mark.long
def test_training_without_torch_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def train(folder: Path, epochs: int) -> str:
        return run("-c", WITHOUT_TORCH, SAMPLES / "train_without_torch.py", "train", folder, "--epochs", epochs)

    one, two = tmp_path / "one", tmp_path / "two"
    sample("train_without_torch", "export", one)
    two.mkdir()
    for path in one.iterdir():
        (two / path.name).write_bytes(path.read_bytes())
    whole = train(one, 4)
    train(two, 3)
    rest = train(two, 1)
    assert "going on after 3 epochs" in rest
    assert numbers("loss #, test accuracy #%", rest) == numbers("loss #, test accuracy #%", whole)
    final, other = (load_file(folder / "checkpoint.safetensors") for folder in (one, two))
    assert set(final) == set(other)
    for name, array in final.items():
        np.testing.assert_array_equal(other[name], array, strict=True)
    (two / "checkpoint.safetensors").unlink()
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Linear(128, 10)
    )
    module.load_state_dict({name: torch.from_numpy(final[name]) for name in module.state_dict()})
    with np.load(one / "digits.npz") as data, torch.no_grad():
        predicted = module(torch.from_numpy(data["test_images"])).argmax(1).numpy()
        accuracy = 100 * (predicted == data["test_labels"]).mean()
    assert numbers("test accuracy #%", whole) == [pytest.approx(accuracy, abs=0.005)]


@pytest.mark.long
def test_a_force_field_learns_forces() -> None:
    output = sample("force_field", "--steps", 300, "--width", 48, "--error", 0.3)
    before, after = numbers("error of the forces: # before training, # after", output)
    assert after < 0.3 < before
    whole, potential = numbers("stays within #, the potential energy within #", output)
    assert whole < potential / 5


@pytest.mark.long
def test_a_network_solves_the_heat_equation() -> None:
    output = sample("heat_equation", "--steps", 400, "--width", 16, "--batch-size", 64, "--error", 0.05)
    before, after = numbers("temperature: # before training, # after", output)
    assert after < 0.05 < 0.5 < before


@pytest.mark.long
def test_a_generator_learns_from_a_penalised_critic() -> None:
    output = sample("wgan_gp", "--steps", 150, "--width", 32, "--share", 0.2)
    before, after = numbers("near the ring: #% of the points before training, #% after", output)
    assert before < 5 and after >= 20
