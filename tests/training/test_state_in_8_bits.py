"""AdamW8bit trains as AdamW does, in sessions, exported from PyTorch, and in PyTorch itself."""

from __future__ import annotations

import copy
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfuse
from gradfuse import ArgumentError, TrainingSession, TrainingStep, export_training_step, optimizers
from gradfuse.torch import Adam8bit, AdamW8bit
from gradfuse.training.in_place import with_ordered_updates

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "samples"))
import tiny_gpt

WIDTH = 70  # 70 * 70 elements are no whole number of blocks
CODES, SCALES = ("exp_avg", "exp_avg_sq"), ("exp_avg_scale", "exp_avg_sq_scale")


def model(kind: str = "float") -> onnx.ModelProto:
    """A layer with a weight of 4900 elements and a bias."""
    built = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> forward ({kind}[n, {WIDTH}] x) => ({kind}[n, {WIDTH}] y) '
        f"<{kind}[{WIDTH},{WIDTH}] weight, {kind}[{WIDTH}] bias> "
        "{ hidden = MatMul(x, weight)  y = Add(hidden, bias) }"
    )
    numbers, dtype = np.random.default_rng(0), {"float": np.float32, "double": np.float64}[kind]
    for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,))):
        array = (numbers.standard_normal(shape) * 0.1).astype(dtype)
        built.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return built


def batches(count: int) -> list[tuple[Any, Any]]:
    numbers = np.random.default_rng(1)
    return [tuple(numbers.standard_normal((2, 8, WIDTH)).astype(np.float32)) for _ in range(count)]


def trained(step: TrainingStep, data: list[tuple[Any, Any]], **options: Any) -> dict[str, Any]:
    session = TrainingSession(step, **options)
    for batch in data:
        session.step(*batch)
    return session.state_dict()


def test_state_has_two_bytes_a_parameter_where_that_is_much() -> None:
    step = gradfuse.build_training_step(model(), "mse", optimizer=optimizers.AdamW8bit(lr=0.01), check=False)
    found = {name: (array.dtype.name, array.shape) for name, array in step.optimizer_state.items()}
    assert found == {
        **{f"weight.{name}": ("uint8", (WIDTH, WIDTH)) for name in CODES},
        **{f"weight.{name}": ("float32", (20,)) for name in SCALES},
        **{f"bias.{name}": ("float32", (WIDTH,)) for name in CODES},
        "step": ("int64", ()),
    }
    large = sum(array.nbytes for name, array in step.optimizer_state.items() if name.startswith("weight"))
    assert large < 2.1 * WIDTH * WIDTH
    operators = {node.op_type for node in step.model.graph.node}
    assert {"ApplyAdamW", "ApplyAdamW8bit"} <= operators
    overwritten = with_ordered_updates(step.model).in_place
    assert {f"weight.{name}" for name in (*CODES, *SCALES)} | {"weight"} <= overwritten


def test_parameters_of_float64_keep_all_digits() -> None:
    step = gradfuse.build_training_step(model("double"), "mse", optimizer=optimizers.AdamW8bit(lr=0.01), check=False)
    assert step.optimizer_state["weight.exp_avg"].dtype == np.float64


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam": {"optimizer": optimizers.Adam8bit(lr=0.01, weight_decay=0.125)},
    "any betas": {"optimizer": optimizers.AdamW8bit(lr=0.01, betas=(1 / 3, 0.99))},
    "clipped": {"max_grad_norm": 0.01},
    "accumulated": {"accumulate": 2},
    "scaled": {"grad_scaler": optimizers.GradScaler(init_scale=2.0**127, growth_interval=3), "max_grad_norm": 0.01},
    "averaged": {"average": optimizers.EMA(decay=0.5)},
    "maximized": {"optimizer": optimizers.AdamW8bit(lr=0.01, maximize=True)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_operator_and_nodes_make_the_same_updates_as_32_bits_nearly(name: str) -> None:
    options: dict[str, Any] = {"optimizer": optimizers.AdamW8bit(lr=0.01), "check": False} | OPTIONS[name]
    eight = options["optimizer"]
    kind = optimizers.AdamW if isinstance(eight, optimizers.AdamW) else optimizers.Adam
    full = kind(lr=eight.lr, betas=eight.betas, weight_decay=eight.weight_decay, maximize=eight.maximize)
    data = batches(12)
    changes: list[dict[str, Any]] = [{}, {"fuse": False}, {"optimizer": full}]
    by_operator, by_nodes, wide = (
        trained(gradfuse.build_training_step(model(), "mse", **(options | changed)), data) for changed in changes
    )
    before = {one.name: onnx.numpy_helper.to_array(one) for one in model().graph.initializer}
    way = np.linalg.norm(wide["weight"] - before["weight"])
    assert way > 0.01
    # A rounding may make a code the next one.
    assert np.linalg.norm(by_operator["weight"] - by_nodes["weight"]) < 1e-3 * way
    assert np.linalg.norm(by_operator["weight"] - wide["weight"]) < 0.03 * way
    np.testing.assert_allclose(by_operator["bias"], wide["bias"], rtol=0, atol=0.03 * np.abs(wide["bias"]).max())


def test_resuming_from_a_checkpoint_is_bit_identical(tmp_path: Path) -> None:
    step = gradfuse.build_training_step(model(), "mse", optimizer=optimizers.AdamW8bit(lr=0.01), check=False)
    data = batches(6)
    session = TrainingSession(step)
    for batch in data[:3]:
        session.step(*batch)
    session.save(tmp_path / "checkpoint.safetensors")
    other = TrainingSession(step)
    other.load(tmp_path / "checkpoint.safetensors")
    losses = [[one.step(*batch) for batch in data[3:]] for one in (session, other)]
    assert losses[0] == losses[1]
    for name, array in session.state_dict().items():
        np.testing.assert_array_equal(array, other.state_dict()[name])


def test_in_place_or_not_are_the_same_bits() -> None:
    step = gradfuse.build_training_step(model(), "mse", optimizer=optimizers.AdamW8bit(lr=0.01), check=False)
    data = batches(4)
    session = TrainingSession(step)
    for batch in data:
        session.step(*batch)
    values = step.parameters | step.optimizer_state | step.hyperparameters
    options = onnxruntime.SessionOptions()
    gradfuse.register(options)
    plain = onnxruntime.InferenceSession(step.model.SerializeToString(), options)
    names = [output.name for output in plain.get_outputs()]
    for pair in data:
        given = {value.name: value for value in plain.get_inputs()}
        feeds = values | dict(zip((name for name in given if name not in values), pair, strict=True))
        results = dict(zip(names, plain.run(None, feeds), strict=True))
        values |= {name: results[f"{name}.updated"] for name in values if f"{name}.updated" in results}
    for name, array in session.state_dict().items():
        np.testing.assert_array_equal(array, values[name])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"amsgrad": True}, "AdamW8bit: amsgrad is True; expected False, as no third state is kept in 8 bits"),
        ({"betas": (1.0, 0.5)}, r"AdamW8bit: betas is \(1.0, 0.5\); expected two numbers from 0 to below 1"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        optimizers.AdamW8bit(lr=0.01, **options)


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 80), nn.Tanh(), nn.Linear(80, 5))


def learn(net: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def samples(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(9, WIDTH, generator=generator), torch.randint(5, (9,), generator=generator)) for _ in range(count)
    ]


@pytest.mark.parametrize("updates_before", [0, 3])
def test_an_exported_step_goes_on_as_pytorch_does(updates_before: int) -> None:
    net, data = module(), samples(8)
    weights = [one for one in net.parameters() if one.dim() > 1]
    others = [one for one in net.parameters() if one.dim() == 1]
    groups = [{"params": weights}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    optimizer = AdamW8bit(groups, lr=0.01, weight_decay=0.125)
    learn(net, optimizer, data[:updates_before])
    step = export_training_step(net, F.cross_entropy, data[0], optimizer, evaluation=False)
    session = TrainingSession(step)
    losses = [session.step(x.numpy(), y.numpy()) for x, y in data]
    np.testing.assert_allclose(losses, learn(net, optimizer, data), rtol=1e-4)
    assert step.optimizer_state["0.weight.exp_avg"].dtype == np.uint8
    assert step.optimizer_state["2.weight.exp_avg"].dtype == np.float32


@pytest.mark.parametrize("kind, wide", [(AdamW8bit, torch.optim.AdamW), (Adam8bit, torch.optim.Adam)])
def test_the_optimizer_of_pytorch_learns_as_that_of_32_bits(kind: Any, wide: Any) -> None:
    data = samples(20)
    nets = module(), module()
    eight = learn(nets[0], kind(nets[0].parameters(), lr=0.01, weight_decay=0.125), data)
    full = learn(nets[1], wide(nets[1].parameters(), lr=0.01, weight_decay=0.125), data)
    np.testing.assert_allclose(eight, full, rtol=0.02)


def test_where_there_is_no_operator_pytorchs_own_make_the_same_update() -> None:
    """In float64, which a state of float32 begins."""
    generator = torch.Generator().manual_seed(0)
    narrow = nn.Parameter(torch.randn(90, 90, generator=generator))
    optimizer = AdamW8bit([narrow], lr=0.01)
    narrow.grad = torch.randn(90, 90, generator=generator)
    optimizer.step()
    wide = nn.Parameter(narrow.detach().double())
    other = AdamW8bit([wide], lr=0.01)
    other.state[wide] = copy.deepcopy(optimizer.state[narrow])
    narrow.grad = torch.randn(90, 90, generator=generator)
    wide.grad = narrow.grad.double()
    optimizer.step()
    other.step()
    torch.testing.assert_close(narrow.detach().double(), wide.detach(), rtol=1e-6, atol=1e-7)
    for name in CODES:
        off = optimizer.state[narrow][name].int() - other.state[wide][name].int()
        assert off.abs().max() <= 1 and off.count_nonzero() < 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_keeps_codes_and_scales(dtype: torch.dtype) -> None:
    data = [(x.to(dtype), y) for x, y in samples(6)]
    net = module().to(dtype)
    optimizer = AdamW8bit(net.parameters(), lr=0.01)
    learn(net, optimizer, data[:3])
    twin = copy.deepcopy(net)
    other = AdamW8bit(twin.parameters(), lr=1.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    first = next(iter(twin.parameters()))
    assert [other.state[first][name].dtype for name in (*CODES, *SCALES)] == [torch.uint8] * 2 + [torch.float32] * 2
    assert learn(net, optimizer, data[3:]) == learn(twin, other, data[3:])


def test_refused_in_pytorch() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"^AdamW8bit: lr is -1; expected a number from 0 on$"):
        AdamW8bit([parameter], lr=-1)
    with pytest.raises(ArgumentError, match=r"^Adam8bit: betas is \(0.9, 1.0\); expected two numbers"):
        Adam8bit([parameter], betas=(0.9, 1.0))
    parameter.grad = torch.zeros(3).to_sparse()
    with pytest.raises(ArgumentError, match=r"^AdamW8bit: gradient is sparse; expected a dense tensor$"):
        AdamW8bit([parameter]).step()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_a_gpt_learns_as_well_as_with_32_bits(seed: int) -> None:
    """Losses of the last updates of 300, averaged, on the text of the sample."""
    text = tiny_gpt.letters_of("".join(pydoc_data.topics.topics.values()))
    starts = np.random.default_rng(seed).integers(0, len(text) - 40, (300, 8))
    data = [tiny_gpt.windows(text, one, 32) for one in starts]
    finals = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        torch.manual_seed(seed)
        net = tiny_gpt.Gpt(width=64, heads=4, blocks=2, context=32)
        optimizer = kind(tiny_gpt.parameter_groups(net, 0.1), lr=3e-3)
        batch = tuple(map(torch.from_numpy, data[0]))
        step = export_training_step(
            net, tiny_gpt.next_letter_loss, batch, optimizer, max_grad_norm=1.0, evaluation=False, verify="quick"
        )
        session = TrainingSession(step)
        losses = [session.step(*batch) for batch in data]
        finals.append(np.mean(losses[-50:]))
    assert finals[0] == pytest.approx(finals[1], rel=0.005)
