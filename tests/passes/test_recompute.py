"""Training steps within a memory budget: the same bits, the order in onnxruntime, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradfuse
from gradfuse import ArgumentError, ModelError, TrainingSession, TrainingStep
from gradfuse.passes import RecomputePass
from gradfuse.passes.recompute import parse_budget, peak_of

BATCH, WIDTH = 256, 64


class Layer(nn.Module):
    """A residual layer with dropout, whose bias and weight gradients read what the forward pass keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Picture(nn.Module):
    """What onnxruntime's optimizations write in operators of their own: pooling of blocks of channels, one split."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).flatten(2).mT
        q, k, v = self.qkv(tokens).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return self.out((torch.softmax(q @ k.mT / 4, -1) @ v).transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]


def made(budget: int | float | str | None, *, dynamic: bool = False) -> TrainingStep:
    torch.manual_seed(0)
    module = nn.Sequential(*(Layer() for _ in range(6)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batch = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    shapes = ({0: "batch"}, {0: "batch"}) if dynamic else None
    return gradfuse.export_training_step(
        module, nn.MSELoss(), batch, optimizer, memory_budget=budget, dynamic_shapes=shapes, verify="quick"
    )


def state_after(step: TrainingStep) -> list[bytes]:
    session, rng = TrainingSession(step), np.random.default_rng(0)
    for _ in range(3):
        x, y = rng.standard_normal((2, BATCH, WIDTH)).astype(np.float32)
        x[0, 0] = -0.0
        session.step(x, y)
    return [array.tobytes() for array in session.state_dict().values()]


@pytest.mark.long
def test_bits_memory_and_random_numbers(tmp_path: Path) -> None:
    """Three steps with dropout and in-place updates give the same bits; onnxruntime runs the nodes as planned."""
    plain, less = made(None), made(0.6)
    assert state_after(plain) == state_after(less)
    report = less.recomputation
    assert report is not None and report.nodes > 0
    assert report.after <= report.budget <= 0.6 * report.before
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    gradfuse.register(options)
    # It is written in the order in which nodes run, after everything that could be merged is.
    TrainingSession(less, session_options=options)
    really = peak_of(ir.from_proto(onnx.load(tmp_path / "optimized.onnx")))
    assert abs(really - report.after) <= 0.1 * really


def test_a_step_that_updates_nothing_takes_half() -> None:
    """Its gradients are outputs, which nothing reads: they are computed where their layers are, and not at the end."""
    torch.manual_seed(0)
    module = nn.Sequential(*(Layer() for _ in range(6)))
    batch = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    step = gradfuse.export_training_step(module, nn.MSELoss(), batch, memory_budget=0.5, verify="quick")
    assert step.recomputation is not None and step.recomputation.after <= 0.5 * step.recomputation.before


def test_what_is_refused() -> None:
    for wrong in (0, -1, True, 0.0, 1.5, float("nan"), "512 MuB", "", "0", None):
        with pytest.raises(ArgumentError, match="expected bytes"):
            parse_budget(wrong, "x")
    assert [parse_budget(one, "x") for one in ("1KiB", "2 MB", "0.5", "77", 0.5, 9)] == [1024, 2000000, 0.5, 77, 0.5, 9]


def test_sizes_that_do_not_fit_each_other_are_asked_for() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]> g (float[N, 2] x) => (float[rows, 2] y)
        <int64[2] s = {-1, 2}, float[2] w = {1, 2}> { h = Mul(x, w)  c = Concat<axis = 1>(h, x)  y = Reshape(c, s) }"""
    )
    text = "where the sizes of 'N', 'rows' are taken to be 64; expected their sizes"
    with pytest.raises(ModelError, match=text):
        gradfuse.build_training_step(model, "mse", memory_budget=1.0)
    sizes = {"N": 4, "rows": 8}
    assert gradfuse.build_training_step(model, "mse", memory_budget=1.0, memory_sizes=sizes).recomputation is not None


@pytest.mark.long
def test_the_least_is_named_and_possible() -> None:
    """An error names the least; that much is enough, and the model is left as it was where it is refused."""
    step = made(None, dynamic=True)
    with pytest.raises(ArgumentError, match="has no size") as caught:
        RecomputePass(1000)(ir.from_proto(step.model))
    model = ir.from_proto(step.model)
    with pytest.raises(ArgumentError, match="the least that was found") as caught:
        RecomputePass(1000, {"batch": BATCH})(model)
    assert ir.to_proto(model).SerializeToString() == ir.to_proto(ir.from_proto(step.model)).SerializeToString()
    least = int(str(caught.value).rpartition("(")[2].partition(")")[0])
    recompute = RecomputePass(least, {"batch": BATCH})
    recompute(model)
    assert recompute.report is not None and recompute.report.after <= least


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("budget", [1.0, 0.9])
def test_a_process_grows_by_what_is_predicted(tmp_path: Path, budget: float) -> None:
    torch.manual_seed(0)
    module, x, y = Picture(), torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = gradfuse.export_training_step(
        module, nn.CrossEntropyLoss(), (x, y), optimizer, memory_budget=budget, verify="quick"
    )
    step.save(tmp_path / "step.onnx")
    np.savez(tmp_path / "batch.npz", **{"0_0": x.numpy(), "1_0": y.numpy()})  # type: ignore[arg-type]
    script = Path(__file__).parents[2] / "benchmarks" / "step_memory.py"
    command = [sys.executable, str(script), "run", "step.onnx", "batch.npz", "--no-arena"]
    # Each larger piece of memory is the system's.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    grown = float(subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True).stdout)
    assert step.recomputation is not None
    assert abs(grown - step.recomputation.after / 2**20) <= 0.1 * grown


class Tied(nn.Module):
    """Layers between an embedding and a head that has its weight: the batch's own classes are predicted at once."""

    def __init__(self, *, wraps: bool) -> None:
        super().__init__()
        self.embed, self.wraps = nn.Embedding(97, WIDTH), wraps
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.wraps else layer(x))
        return x @ self.embed.weight.T  # type: ignore[no-any-return]


def test_float16_is_compared_on_another_batch_than_the_one_that_is_given() -> None:
    def step_of(*, wraps: bool) -> TrainingStep:
        torch.manual_seed(0)
        module = Tied(wraps=wraps)
        ids = torch.randint(0, 97, (8, 32))
        return gradfuse.export_training_step(
            module,
            lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            (ids, ids),
            torch.optim.AdamW(module.parameters(), lr=1e-2),
            autocast=torch.float16,
            verify="quick",
        )

    results = []
    ids, labels = np.random.default_rng(0).integers(0, 97, (2, 8, 32))
    for step in (step_of(wraps=False), step_of(wraps=True)):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        gradfuse.register(options)
        session = onnxruntime.InferenceSession(step.model.SerializeToString(), options)
        batch = {step.input_names[0]: ids, step.target_names[0]: labels}
        names = [output.name for output in session.get_outputs()]
        results.append(dict(zip(names, session.run(names, step.initial_values | batch), strict=True)))
    for name, array in results[0].items():
        np.testing.assert_array_equal(results[1][name], array, err_msg=name)
