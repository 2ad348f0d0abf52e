"""Sessions that share parameters: the two steps of a GAN, and an actor and a critic over one trunk."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training.models import assert_trained

from gradfuse import ArgumentError, TrainingSession, TrainingStep, export_training_step

ROUNDS = 3


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    # A bias ahead of a normalisation has no gradient but rounding, which Adam takes for one.
    generator = nn.Sequential(nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    return generator, nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))


class Gan(nn.Module):
    """What both steps have, so that the names are the same."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator


class Judging(Gan):
    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.discriminator(real), self.discriminator(self.generator(noise).detach())


class Deceiving(Gan):
    def forward(self, noise: Tensor) -> Any:
        return self.discriminator(self.generator(noise))


def judged(scores: tuple[Tensor, Tensor]) -> Tensor:
    return F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()


def deceived(scores: Tensor) -> Tensor:
    return F.softplus(-scores).mean()


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 4) + 2, torch.randn(8, 3)) for _ in range(ROUNDS)]


def optimizers(generator: nn.Module, discriminator: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    of_judge = torch.optim.AdamW(discriminator.parameters(), lr=0.02)
    return of_judge, torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.5)


def steps(**options: Any) -> tuple[TrainingStep, TrainingStep]:
    pair = networks()
    (real, noise), (of_judge, of_generator) = data()[0], optimizers(*pair)
    judge = export_training_step(Judging(*pair), judged, ((real, noise), None), of_judge, evaluation=False, **options)
    return judge, export_training_step(Deceiving(*pair), deceived, (noise, None), of_generator, **options)


@pytest.fixture(scope="module")
def gan() -> tuple[TrainingStep, TrainingStep]:
    return steps()


def by_torch(dtype: torch.dtype) -> nn.Module:
    pair = [one.to(dtype) for one in networks()]
    of_judge, of_generator = optimizers(*pair)
    judge, deceiver = Judging(*pair), Deceiving(*pair)
    for real, noise in data():
        of_judge.zero_grad()
        judged(judge(real.to(dtype), noise.to(dtype))).backward()  # type: ignore[no-untyped-call]
        of_judge.step()
        of_generator.zero_grad()
        deceived(deceiver(noise.to(dtype))).backward()  # type: ignore[no-untyped-call]
        of_generator.step()
    return judge


def trained(judge: TrainingSession, deceiver: TrainingSession) -> None:
    for real, noise in data():
        judge.step((real, noise))
        deceiver.step(noise)


@pytest.mark.parametrize("which", ["kernels", "bodies", "one of each", "files"])
@pytest.mark.sampled(every=2)
def test_the_two_steps_of_a_gan_are_those_of_torch(
    gan: tuple[TrainingStep, TrainingStep], which: str, tmp_path: Path
) -> None:
    """Batch normalisation of both networks changes buffers in both steps; only kernels write in place."""
    bodies = {"session_options": onnxruntime.SessionOptions()}
    first, second = {"bodies": (bodies, bodies), "one of each": (bodies, {})}.get(which, ({}, {}))
    given: list[Any] = list(gan)
    if which == "files":
        for index, step in enumerate(gan):
            given[index] = tmp_path / f"{index}.onnx"
            step.save(given[index])
    judge = TrainingSession(given[0], **first)
    deceiver = TrainingSession(given[1], share_with=judge, **second)
    trained(judge, deceiver)
    native, exact = by_torch(torch.float32), by_torch(torch.float64)
    for session in (judge, deceiver):
        assert_trained(session.state_dict(), native, exact, 2 * ROUNDS)
    addresses = [{name: one.ort_values[name].data_ptr() for name in native.state_dict()} for one in (judge, deceiver)]
    assert addresses[0] == addresses[1]


def test_what_one_session_loads_the_other_has(gan: tuple[TrainingStep, TrainingStep], tmp_path: Path) -> None:
    judge = TrainingSession(gan[0])
    deceiver = TrainingSession(gan[1], share_with=judge)
    trained(judge, deceiver)
    for name, session in {"judge": judge, "deceiver": deceiver}.items():
        session.save(tmp_path / name)
    trained(judge, deceiver)
    wanted = {**judge.state_dict(), **{f"{n}'": v.numpy().copy() for n, v in deceiver.ort_values.items()}}
    again = TrainingSession(gan[0])
    beside = TrainingSession(gan[1], share_with=again)
    again.step(data()[0])
    for name, session in {"judge": again, "deceiver": beside}.items():
        session.load(tmp_path / name)
    assert (again.step_count, beside.step_count) == (ROUNDS, ROUNDS)
    trained(again, beside)
    found = {**again.state_dict(), **{f"{n}'": v.numpy().copy() for n, v in beside.ort_values.items()}}
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name])


class Policy(nn.Module):
    """An actor and a critic over one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 1)


class Actor(Policy):
    def forward(self, x: Tensor) -> Tensor:
        return self.actor(torch.tanh(self.trunk(x)))  # type: ignore[no-any-return]


class Critic(Policy):
    def forward(self, x: Tensor) -> Tensor:
        return self.critic(torch.tanh(self.trunk(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("library", [True, False])
def test_three_sessions_train_one_trunk_in_any_order(library: bool) -> None:
    """Each has an optimizer of its own of the trunk; two of them are of one step."""
    torch.manual_seed(0)
    policy = Policy()
    x, action, value = torch.randn(6, 3), torch.randint(0, 2, (6,)), torch.randn(6, 1)

    def made(kind: type[Policy], source: nn.Module) -> Policy:
        module = kind()
        for name, child in source.named_children():
            setattr(module, name, child)
        return module

    def adam(module: nn.Module, head: str) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for n, p in module.named_parameters() if n.startswith((head, "trunk"))], lr=0.05)

    options = {} if library else {"session_options": onnxruntime.SessionOptions()}
    of_actor = export_training_step(
        made(Actor, policy), nn.CrossEntropyLoss(), (x, action), adam(policy, "actor"), evaluation=False
    )
    of_critic = export_training_step(
        made(Critic, policy), nn.MSELoss(), (x, value), adam(policy, "critic"), evaluation=False
    )
    sessions = [TrainingSession(of_actor, **options)]
    sessions += [TrainingSession(step, share_with=sessions[0], **options) for step in (of_critic, of_actor)]
    order = [*itertools.chain(*itertools.permutations(range(3))), 0, 0, 2, 1, 1, 1]
    results = []
    for dtype in (torch.float32, torch.float64):
        twin = copy.deepcopy(policy).to(dtype)
        modules = [made(kind, twin) for kind in (Actor, Critic, Actor)]
        updates = [adam(twin, head) for head in ("actor", "critic", "actor")]
        for which in order:
            loss = F.mse_loss(modules[1](x.to(dtype)), value.to(dtype)) if which == 1 else None
            loss = F.cross_entropy(modules[which](x.to(dtype)), action) if loss is None else loss
            updates[which].zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            updates[which].step()
        results.append(twin)
    for which in order:
        sessions[which].step(x, value if which == 1 else action)
    for session in sessions:
        assert_trained(session.state_dict(), results[0], results[1], len(order))


def test_what_cannot_be_shared_is_refused(gan: tuple[TrainingStep, TrainingStep]) -> None:
    judge = TrainingSession(gan[0])
    x, y = torch.randn(4, 3), torch.randn(4, 1)
    with pytest.raises(ArgumentError, match="share_with is TrainingStep; expected a TrainingSession"):
        TrainingSession(gan[1], share_with=gan[0])  # type: ignore[arg-type]
    other = export_training_step(Critic(), nn.MSELoss(), (x, y), evaluation=False)
    with pytest.raises(ArgumentError, match="share_with: no parameter or buffer is of both steps"):
        TrainingSession(other, share_with=judge)
    generator, _ = networks()
    larger = Deceiving(generator, nn.Sequential(nn.Linear(4, 7, bias=False), nn.Identity(), nn.Tanh(), nn.Linear(7, 1)))
    step = export_training_step(larger, deceived, (data()[0][1], None), evaluation=False)
    with pytest.raises(ArgumentError, match=r"'discriminator\.0\.weight' is float32 of shape \(7, 4\); expected"):
        TrainingSession(step, share_with=judge)
    frozen = Deceiving(*networks())
    frozen.discriminator.requires_grad_(False)
    step = export_training_step(frozen, deceived, (data()[0][1], None), evaluation=False)
    with pytest.raises(ArgumentError, match=r"'discriminator\.0\.weight' is a constant of one step, and another one"):
        TrainingSession(step, share_with=judge)
