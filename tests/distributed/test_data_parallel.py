"""Ranks train what one process of PyTorch trains on the whole batch, and none hangs where something fails."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.ranks import Ranks
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from training.models import assert_trained

import gradfuse
from gradfuse.distributed import DataParallelSession, LostRankError
from gradfuse.testing import assert_gradients_close

IGNORED = -100
CUTS = (5, 3, 0, 7, 8, 2)
"""How many of the eight rows of each batch the first rank has."""


class Net(nn.Module):
    """Two linear layers, with batch normalisation between them or without."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.tanh(hidden if self.norm is None else self.norm(hidden)))  # type: ignore[no-any-return]


def model_of(module: Net, dropout: bool = False) -> onnx.ModelProto:
    """The same in ONNX, whose export by PyTorch takes seconds."""
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    nodes = [helper.make_node("Gemm", ["x", "first.weight", "first.bias"], ["hidden"], transB=1)]
    hidden = "hidden"
    if module.norm is not None:
        names = [f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
        nodes.append(helper.make_node("BatchNormalization", [hidden, *names], ["normal"]))
        hidden = "normal"
    nodes.append(helper.make_node("Tanh", [hidden], ["active"]))
    if dropout:
        state |= {"ratio": np.array(0.5, np.float32), "training": np.array(True)}
        nodes.append(helper.make_node("Dropout", ["active", "ratio", "training"], ["dropped"]))
    nodes.append(
        helper.make_node("Gemm", ["dropped" if dropout else "active", "last.weight", "last.bias"], ["y"], transB=1)
    )
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array, name) for name, array in state.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@dataclasses.dataclass
class Case:
    """A training, and how PyTorch does it."""

    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss: Any = "cross_entropy"
    reduction: str = "mean"
    norm: bool = False
    cuts: Sequence[int] = CUTS


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


ADAMW: dict[str, Any] = {"optimizer": gradfuse.optimizers.AdamW(lr=0.02)}
SGD: dict[str, Any] = {"optimizer": gradfuse.optimizers.SGD(lr=0.05, momentum=0.9)}
CASES = {
    "uneven": Case(adamw, ADAMW),
    "clipped": Case(sgd, {**SGD, "max_grad_norm": 0.3}),
    "accumulated": Case(adamw, {**ADAMW, "accumulate": 3, "max_grad_norm": 0.3}),
    "accumulated, as nodes": Case(sgd, {**SGD, "accumulate": 2, "fuse": False}),
    "summed": Case(sgd, SGD, gradfuse.losses.CrossEntropyLoss(reduction="sum"), "sum"),
    "scaled": Case(sgd, {**SGD, "grad_scaler": gradfuse.optimizers.GradScaler(), "accumulate": 2}),
    "batch normalisation": Case(sgd, {**SGD, "train_batch_norm": True}, norm=True, cuts=(5, 3, 4, 6, 2, 4)),
}


def net(case: Case) -> Net:
    torch.manual_seed(3)
    return Net(case.norm)


def data() -> list[tuple[Tensor, Tensor]]:
    """Batches of eight, whose labels are ignored now and then."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in CUTS:
        labels = torch.randint(0, 3, (8,), generator=generator)
        labels[torch.rand(8, generator=generator) < 0.2] = IGNORED
        found.append((torch.randn(8, 4, generator=generator), labels))
    return found


def trained(case: Case, dtype: torch.dtype) -> tuple[list[float], Net]:
    """The same training in PyTorch, in one process. Batch normalisation is by shares, as on every rank."""
    module = net(case).to(dtype)
    optimizer = case.optimizer(list(module.parameters())) if case.optimizer is not None else None
    accumulate, losses = case.options.get("accumulate", 1), []
    for index, ((x, y), cut) in enumerate(zip(data(), case.cuts, strict=True)):
        if case.norm:
            assert module.norm is not None
            shares = [copy.deepcopy(module.norm) for _ in range(2)]
            outputs = []
            for norm, part in zip(shares, (slice(0, cut), slice(cut, None)), strict=True):
                hidden = norm(module.first(x[part].to(dtype)))
                # What the modules share is what is trained.
                norm.weight, norm.bias = module.norm.weight, module.norm.bias
                hidden = F.batch_norm(module.first(x[part].to(dtype)), None, None, norm.weight, norm.bias, True)
                outputs.append(module.last(torch.tanh(hidden)))
            counts = [float((y[:cut] != IGNORED).sum()), float((y[cut:] != IGNORED).sum())]
            for name in ("running_mean", "running_var"):
                first, second = (getattr(norm, name) for norm in shares)
                getattr(module.norm, name).copy_((counts[0] * first + counts[1] * second) / sum(counts))
            output = torch.cat(outputs)
        else:
            output = module(x.to(dtype))
        loss = F.cross_entropy(output, y, reduction=case.reduction)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if optimizer is not None and (index + 1) % accumulate == 0:
            if "max_grad_norm" in case.options:
                nn.utils.clip_grad_norm_(module.parameters(), case.options["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
    return losses, module


def share(rank: int, tensors: Sequence[Tensor], cut: int) -> list[Tensor]:
    return [tensor[:cut] if rank == 0 else tensor[cut:] for tensor in tensors]


def run_cases(rank: int, steps: dict[str, gradfuse.TrainingStep]) -> dict[str, Any]:
    """What a rank does: all trainings, then all mistakes."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        # The second rank has no step of its own.
        session = DataParallelSession(steps[name] if rank == 0 else None, reduction=case.reduction)
        losses = [session.step(*share(rank, xy, cut)) for xy, cut in zip(data(), case.cuts, strict=True)]
        found[name] = losses, session.state_dict()
    found["gradients"] = gradients(steps["gradients"], rank)
    found["resumed"] = resumed(steps["dropout"], rank)
    found["mistakes"] = mistakes(steps, rank)
    return found


def gradients(step: gradfuse.TrainingStep, rank: int) -> dict[str, Any]:
    session = DataParallelSession(step)
    x, y = data()[0]
    session.step(*share(rank, (x, y), 5))
    return session.gradients


def resumed(step: gradfuse.TrainingStep, rank: int) -> tuple[Any, ...]:
    """The state after steps that were and were not stopped after two, and an output of each rank's own dropout."""
    folder = Path(os.environ["RANKS_FOLDER"])
    session = DataParallelSession(step)
    x, y = data()[0]
    states = []
    for stop in (False, True):
        session = DataParallelSession(step)
        for index in range(4):
            session.step(*share(rank, (x, y), (4, 0, 5, 3)[index]))
            if index == 1:
                session.save(folder / f"state{rank}.safetensors", extra={"order": [1, 2]})
            if stop and index == 1:
                session = DataParallelSession(step)
                path = folder / "state0.safetensors" if rank == 0 else folder / "nowhere"
                assert session.load(path) == {"order": [1, 2]} and session.step_count == 2
        states.append(session.state_dict())
    alike = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)
    session.step(*alike)
    return states[0], states[1], session.outputs["y"], not (folder / "state1.safetensors").exists()


def mistakes(steps: dict[str, gradfuse.TrainingStep], rank: int) -> dict[str, Any]:
    """The lines that a rank gets where something is wrong, and whether anything was changed."""
    x, y = data()[0]
    first = rank == 0
    session = DataParallelSession(steps["uneven"])
    before = session.state_dict()
    bad = y.clone()
    bad[7] = 3
    mean = steps["no targets"]
    told: dict[str, Any] = {
        "label": line(lambda: session.step(*share(rank, (x, bad), 5))),
        "call": line(lambda: session.any_rank(True) if first else session.step(x, y)),
        "rows": line(lambda: session.step(None)),
        "weight": line(lambda: session.step(x, y, weight=-1.0)),
        "file": line(lambda: session.load(Path(os.environ["RANKS_FOLDER"]) / "nowhere")),
        "names": line(lambda: session.load_state_dict({"nothing": x})),
        "step": line(lambda: DataParallelSession(steps["uneven" if first else "clipped"])),
        "none": line(lambda: DataParallelSession(None if first else steps["uneven"])),
        "reduction": line(lambda: DataParallelSession(steps["uneven"], reduction="mean" if first else "sum")),
        "word": line(lambda: DataParallelSession(steps["uneven"], reduction="max")),
        "path": line(lambda: DataParallelSession("nowhere.onnx" if first else steps["uneven"])),
        "carried": line(lambda: DataParallelSession(steps["carrying"])),
        "shapes": line(lambda: DataParallelSession(mean).step(x[: 3 + rank, None].repeat(1, 2 + rank, 1))),
    }
    told["flags"] = session.any_rank(not first), session.any_rank(False)
    session.learning_rate = 0.1 + rank
    told["hyperparameters"] = line(lambda: session.step(x, y))
    told["changed"] = [name for name, value in session.state_dict().items() if (value != before[name]).any()]
    halves = DataParallelSession(steps["accumulated"])
    halves.step(x, y)
    told["folder"] = str(Path(os.environ["RANKS_FOLDER"]) / "nowhere")
    told["between"] = line(lambda: halves.save("never.safetensors"))
    return told


def line(action: Callable[[], Any]) -> str:
    try:
        action()
    except gradfuse.GradfuseError as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    steps = {
        name: gradfuse.build_training_step(model_of(net(case)), case.loss, **case.options)
        for name, case in CASES.items()
    }
    plain = model_of(net(Case()))
    steps["gradients"] = gradfuse.build_training_step(plain, "cross_entropy")
    steps["dropout"] = gradfuse.build_training_step(
        model_of(net(Case()), dropout=True), "cross_entropy", outputs=["y"], **ADAMW
    )
    mean = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        mean (float[batch, length, 4] x) => (float loss) <float[4, 3] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {
            y = MatMul(x, w)
            z = Tanh(y)
            loss = ReduceMean<keepdims = 0>(z)
        }
    """)
    steps["no targets"] = gradfuse.build_training_step(mean, None)
    carried = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        carried (float[2, 4] x, float[2, 4] state) => (float loss, float[2, 4] next) <float[4] w = {1,2,3,4}> {
            y = Mul(x, w)
            next = Add(y, state)
            loss = ReduceMean<keepdims = 0>(next)
        }
    """)
    carrying = gradfuse.build_training_step(carried, None, outputs=["next"]).carrying({"state": "next"})
    folder = tmp_path_factory.mktemp("ranks")
    os.environ["RANKS_FOLDER"] = str(folder)
    return Ranks(run_cases, folder, {**steps, "carrying": carrying}).results()


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_process_with_the_whole_batch(results: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    (losses, state), (other_losses, other_state) = (result[name] for result in results)
    assert losses == other_losses
    for key, value in state.items():
        np.testing.assert_array_equal(value, other_state[key])
    (native, module), (exact, reference) = trained(case, torch.float32), trained(case, torch.float64)
    for one in (module, reference):
        if one.norm is not None:
            # A model in ONNX has none.
            del one.norm.num_batches_tracked
    assert_trained({name: state[name] for name in module.state_dict()}, module, reference, len(exact))
    worst = max(abs(a - b) for a, b in zip(native, exact, strict=True))
    assert max(abs(a - b) for a, b in zip(losses, exact, strict=True)) <= 4 * worst


def test_gradients_are_those_of_the_whole_batch(results: list[dict[str, Any]]) -> None:
    x, y = data()[0]
    native, exact = net(Case()), net(Case()).double()
    for module, dtype in ((native, torch.float32), (exact, torch.float64)):
        F.cross_entropy(module(x.to(dtype)), y).backward()  # type: ignore[no-untyped-call]
    for result in results:
        wanted = dict(exact.named_parameters())
        assert set(result["gradients"]) == set(wanted)
        for name, parameter in native.named_parameters():
            assert_gradients_close(result["gradients"][name], parameter.grad, wanted[name].grad, np.float32)


def test_a_run_that_was_stopped_ends_bit_identically(results: list[dict[str, Any]]) -> None:
    for result in results:
        whole, stopped, _, first_alone = result["resumed"]
        assert first_alone or result is results[0]
        for name, value in whole.items():
            np.testing.assert_array_equal(value, stopped[name])
            np.testing.assert_array_equal(value, results[0]["resumed"][0][name])


def test_each_rank_drops_others(results: list[dict[str, Any]]) -> None:
    first, second = (result["resumed"][2] for result in results)
    assert (first != second).any()


def test_mistakes_are_one_line_on_all_ranks(results: list[dict[str, Any]]) -> None:
    first, second = (result["mistakes"] for result in results)
    who = "DataParallelSession"
    assert first["label"] == f"GradfuseError {who}.step: rank 1 has failed; nothing is changed on any rank"
    assert second["label"].startswith("ArgumentError TrainingSession.step: 'target'[2] is 3; expected 0 to 2, or -100")
    assert first["call"] == f"GradfuseError {who}.any_rank: rank 1 calls step; expected one call on all ranks"
    assert second["call"] == f"GradfuseError {who}.step: rank 0 calls any_rank; expected one call on all ranks"
    same = {
        "rows": f"ArgumentError {who}.step: no rank has rows; expected at least one that has",
        "weight": f"ArgumentError {who}.step: weight is -1.0; expected a finite number from 0 on",
        "word": f"ArgumentError {who}: reduction is 'max'; expected 'mean' or 'sum'",
        "step": f"ArgumentError {who}: rank 1 has another step than rank 0; expected one for all ranks",
        "reduction": f"ArgumentError {who}: rank 1 has another reduction than rank 0; expected one for all ranks",
        "hyperparameters": f"ArgumentError {who}.step: rank 1 has other hyperparameters than rank 0, such as a "
        "learning rate; expected the same on all ranks",
        "between": f"GradfuseError {who}.save: 1 of 3 calls of an update are done; expected it between updates",
        "shapes": f"ArgumentError {who}.step: the shares have different shapes, and the step does not tell what its "
        "loss is a mean over; expected weight on all ranks",
        "carried": f"GradfuseError {who}: the step carries 'state' from call to call, which would be another on each "
        "rank; expected a step before TrainingStep.carrying",
    }
    assert [one for one in same.items() if one not in first.items()] == []
    assert [one for one in same.items() if one not in second.items()] == []
    assert first["names"] == second["names"] and first["names"].startswith("ArgumentError TrainingSession.load_state_d")
    assert first["file"] == second["file"] and first["file"].endswith("No such file or directory: " + first["folder"])
    assert "rank 0 has failed" in second["none"] and "step is None on the first rank" in first["none"]
    assert "rank 0 has failed: nowhere.onnx" in second["path"] and "ModelError nowhere.onnx" in first["path"]
    for told in (first, second):
        assert told["flags"] == (True, False) and told["changed"] == []


def wait_for_another(rank: int, argument: tuple[gradfuse.TrainingStep, float]) -> tuple[str, float, str, str]:
    """What a rank does whose other one ends, or is silent, after two steps."""
    step, timeout = argument
    session = DataParallelSession(step, timeout=timeout)
    x, y = data()[0]
    for _ in range(2):
        session.step(x, y)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if timeout > 60 else signal.SIGSTOP)
    before, start = session.state_dict(), time.monotonic()
    with pytest.raises(LostRankError) as lost:
        session.step(x, y)
    seconds = time.monotonic() - start
    assert all((value == before[name]).all() for name, value in session.state_dict().items())
    session.save(Path(os.environ["RANKS_FOLDER"]) / "left.safetensors")
    return str(lost.value), seconds, line(lambda: session.step(x, y)), line(lambda: session.any_rank(True))


@pytest.mark.long
@pytest.mark.parametrize("timeout", [120.0, 5.0], ids=["killed", "silent"])
def test_a_rank_that_is_lost_does_not_hang_the_other(tmp_path: Path, timeout: float) -> None:
    os.environ["RANKS_FOLDER"] = str(tmp_path)
    step = gradfuse.build_training_step(model_of(net(Case())), "cross_entropy", **SGD)
    ranks = Ranks(wait_for_another, tmp_path, (step, timeout))
    ranks.processes[0].wait(120)
    ranks.processes[1].kill()
    text, seconds, *later = ranks.results([0, -signal.SIGKILL])[0]
    who = "another rank has ended or does not answer: "
    assert text.startswith(f"DataParallelSession: {who}") and "\n" not in text and "GLHF" not in text
    assert seconds < 30
    assert [one.partition(": ")[0] for one in later] == [
        f"LostRankError DataParallelSession.{name}" for name in ("step", "any_rank")
    ]
    session = gradfuse.TrainingSession(step)
    session.load(tmp_path / "left.safetensors")
    assert session.step_count == 2


@pytest.mark.long
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    example = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0]
    (tmp_path / "train.py").write_text(example + "print(loss)\n", encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    result = subprocess.run(launcher, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    first, second = map(float, result.stdout.split())
    assert first == second < 0.5 and (tmp_path / "trained.safetensors").exists()


def test_there_must_be_a_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(gradfuse.GradfuseError, match=r"there is no process group; expected torch.distributed.init_pro"):
        DataParallelSession(None)
