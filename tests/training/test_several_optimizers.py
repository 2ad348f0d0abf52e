"""One step updates parts of the parameters by optimizers of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from training.models import Batch, Mlp, Whole, assert_trained, batches
from training.test_run_time import in_onnx

import gradfuse
from gradfuse import ArgumentError, ExportError, GradfuseError, TrainingSession, export_training_step, optimizers

RATES = [(0.03 * 0.9**index, 0.07 * 0.8**index) for index in range(8)]


def parts(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    every = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [one for one in every if one.dim() > 1], [one for one in every if one.dim() == 1]


def adamw_and_sgd(module: nn.Module) -> Sequence[optim.Optimizer]:
    matrices, vectors = parts(module)
    return [optim.AdamW(matrices, lr=0.02, weight_decay=0.2), optim.SGD(vectors, lr=0.1, momentum=0.9)]


def muon_and_adamw(module: nn.Module) -> Sequence[optim.Optimizer]:
    matrices, vectors = parts(module)
    return optim.Muon(matrices, lr=0.02), optim.AdamW(vectors, lr=0.01)


def in_torch(module: nn.Module, make: Callable[[nn.Module], Any], data: list[Batch], dtype: torch.dtype) -> nn.Module:
    module = copy.deepcopy(module).to(dtype)
    every = make(module)
    for (x, y), rates in zip(data, RATES, strict=True):
        for one, rate in zip(every, rates, strict=True):
            for group in one.param_groups:
                group["lr"] = rate
            one.zero_grad()
        F.cross_entropy(module(x.to(dtype)), y).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], 0.5)
        for one in every:
            one.step()
    return module


@pytest.mark.parametrize(
    "make, fuse",
    [
        (adamw_and_sgd, True),
        pytest.param(adamw_and_sgd, False, marks=pytest.mark.long),
        pytest.param(muon_and_adamw, True, marks=pytest.mark.long),
    ],
)
def test_updates_are_those_of_torch(make: Any, fuse: bool) -> None:
    torch.manual_seed(0)
    module, data = Whole(), batches(len(RATES), 4)
    step = export_training_step(
        module, F.cross_entropy, data[0], make(module), fuse=fuse, max_grad_norm=0.5, evaluation=False
    )
    session = TrainingSession(step)
    for batch, rates in zip(data, RATES, strict=True):
        session.learning_rate = rates
        session.step(*batch)
    native, exact = (in_torch(module, make, data, dtype) for dtype in (torch.float32, torch.float64))
    assert_trained(session.state_dict(), native, exact, len(data))


def test_a_step_begins_where_optimizers_are_of_which_some_count_no_steps() -> None:
    """SGD knows only whether its buffers have begun, AdamW how often it has stepped."""

    def make(module: nn.Module) -> Sequence[optim.Optimizer]:
        matrices, vectors = parts(module)
        return optim.SGD(vectors, lr=0.1, momentum=0.9, dampening=0.5), optim.AdamW(matrices, lr=0.02)

    torch.manual_seed(0)
    module, data = Mlp(), batches(8, 3)
    twin, ours = copy.deepcopy(module).double(), None
    for one in (module, twin):
        every = make(one)
        for index, (x, y) in enumerate(data):
            if index == 3 and one is module:
                ours = TrainingSession(export_training_step(module, F.cross_entropy, data[0], every, evaluation=False))
            for optimizer in every:
                optimizer.zero_grad()
            F.cross_entropy(one(x.to(one.first.weight.dtype)), y).backward()  # type: ignore[no-untyped-call]
            for optimizer in every:
                optimizer.step()
    assert ours is not None
    for batch in data[3:]:
        ours.step(*batch)
    assert_trained(ours.state_dict(), module, twin, len(data))


def test_patterns_divide_the_parameters_of_an_onnx_model() -> None:
    torch.manual_seed(0)
    module, data = Mlp(), batches(len(RATES), 3)

    def make(module: nn.Module) -> Sequence[optim.Optimizer]:
        matrices, vectors = parts(module)
        return optim.AdamW(matrices, lr=0.02), optim.SGD(vectors, lr=0.1, momentum=0.9)

    every = {"*.weight": optimizers.AdamW(lr=0.02), "*": optimizers.SGD(lr=0.1, momentum=0.9)}
    step = gradfuse.build_training_step(in_onnx(module), "cross_entropy", optimizer=every, max_grad_norm=0.5)
    session = TrainingSession(step)
    assert session.learning_rate == pytest.approx((0.02, 0.1))
    for batch, rates in zip(data, RATES, strict=True):
        session.learning_rate = rates
        session.step(*batch)
    native, exact = (in_torch(module, make, data, dtype) for dtype in (torch.float32, torch.float64))
    assert_trained(session.state_dict(), native, exact, len(data))


def test_parameters_in_two_optimizers_are_refused() -> None:
    module, (batch,) = Mlp(), batches(1, 3)
    twice = [optim.AdamW(module.parameters()), optim.SGD(module.last.parameters(), lr=0.1)]
    for given, message in (
        (twice, r"optimizer has 'last\.weight' in two places, 0 and 1; expected each parameter in one"),
        ([], "optimizer is empty; expected optimizers, or None"),
        ([twice[0], None], "optimizer is NoneType; expected a torch.optim.Optimizer, a list of some, or None"),
    ):
        with pytest.raises(GradfuseError, match=message):
            export_training_step(module, F.cross_entropy, batch, given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"first.*": 0, "*.bias": 1}, r"'first\.bias' in two places, 'first\.\*' and '\*\.bias'; expected each"),
        ({"first.*": 0}, r"leaves out 'last\.weight', 'last\.bias'; expected '\*' for all others"),
        ({"middle.*": 0, "*": 1}, r"optimizer has 'middle\.\*', which matches no parameter; expected some of"),
        ({3: 0}, "optimizer has 3; expected names or patterns of parameters"),
        ({}, "optimizer is dict; expected one of gradfuse"),
    ],
)
def test_patterns_that_do_not_divide_them_are_refused(given: dict[Any, int], message: str) -> None:
    known = [optimizers.AdamW(lr=0.02), optimizers.SGD(lr=0.1)]
    with pytest.raises(ArgumentError, match=message):
        gradfuse.build_training_step(
            in_onnx(Mlp()), "cross_entropy", optimizer={key: known[one] for key, one in given.items()}
        )
    with pytest.raises(ArgumentError, match="optimizer is str; expected one of gradfuse"):
        gradfuse.build_training_step(in_onnx(Mlp()), "cross_entropy", optimizer={"*": "adam"})  # type: ignore[dict-item]


def test_classes_of_the_same_name_are_told_apart() -> None:
    module = Mlp()
    others = torch.optim.AdamW(module.parameters())
    with pytest.raises(ArgumentError, match=r"optimizer is torch\.optim\.adamw\.AdamW; expected one of gradfuse"):
        gradfuse.build_training_step(in_onnx(module), "cross_entropy", optimizer=others)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"loss is torch\.nn\.modules\.loss\.MSELoss; expected a name, an object"):
        gradfuse.build_training_step(in_onnx(module), torch.nn.MSELoss())
    with pytest.raises(ExportError, match=r"optimizer is gradfuse\.optimizers\.AdamW; expected a torch\.optim"):
        gradfuse.export_training_step(module, F.cross_entropy, batches(1, 3)[0], optimizers.AdamW())  # type: ignore[arg-type]
