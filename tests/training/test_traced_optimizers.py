"""Optimizers beside SGD and Adam compute in a graph what they do in PyTorch, or are refused."""

from __future__ import annotations

import copy
import itertools
import math
import random
import threading
from collections import deque
from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from training.models import MakeOptimizer, Mlp, assert_trained, batches, train

import gradfuse
from gradfuse import ExportError, TrainingSession, export_training_step

UPDATES = 12


class Own(optim.Optimizer):
    """Calls `one` for each parameter."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, self.state[p], group)

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class PlainAdam(Own):
    """Counts in Python, and corrects the bias by Python's math."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if len(state) == 0:
            state["t"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
        state["t"] += 1
        state["m"].mul_(0.9).add_(g, alpha=0.1)
        state["v"].mul_(0.999).addcmul_(g, g, value=1 - 0.999)
        rate = group["lr"] * math.sqrt(1 - 0.999 ** state["t"]) / (1 - 0.9 ** state["t"])
        p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-rate)


class Lookahead(Own):
    """Has branches on the count, state that begins as the parameter, and `.data`, as in code of old."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "slow" not in state:
            state["slow"], state["n"] = p.clone(), 0
        state["n"] += 1
        rate = group["lr"] * state["n"] / 4 if state["n"] < 4 else max(group["lr"] * 0.5, group["lr"] / state["n"])
        p.data.sub_(g.data * rate)
        if state["n"] % 3 == 0:
            p.data = state["slow"].data.lerp_(p.data, 0.5).clone()


class Lamb(Own):
    """Has branches on values, a tensor that counts, and a number of Python that changes."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state |= {"t": torch.tensor(0), "m": torch.zeros_like(p), "v": torch.zeros_like(p), "product": 1.0}
        state["t"] += 1
        state["product"] *= 0.9
        if g.norm() > 0.05:
            g = g * (0.05 / g.norm())
        state["m"].lerp_(g, 0.1)
        state["v"].mul_(0.99).addcmul_(g, g, value=0.01)
        update = state["m"] / (1 - state["product"]) / ((state["v"] / (1 - 0.99 ** state["t"])).sqrt() + 1e-6)
        p.sub_(group["lr"] * (p.norm() / update.norm()).clamp(max=0.5) * update)


class ScheduleFree(Own):
    """Keeps in the parameter group what it counts and sums."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, weight_sum=0.0, largest=-1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            rate = group["lr"] * min(group["k"] / 5, 1.0)
            group["largest"] = max(rate, group["largest"])
            weight = group["k"] ** 0.5 * group["largest"] ** 2
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, weight=share).add_(p.grad, alpha=rate * (0.9 * (1 - share) - 1))
                z.sub_(p.grad, alpha=rate)


class Beginning(Own):
    """Begins with the gradient, and with a number in the group that shrinks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, decay=2.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["decay"] *= 0.9
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = p.grad.clone() if "mean" not in state else state["mean"] * 0.9 + p.grad
                p.sub_(state["mean"] * group["lr"] * group["decay"])


class Cycles(Own):
    """Has counters that begin again, in Python, in tensors and in attributes, and others that begin elsewhere."""

    k = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, share=None)
        self.least: float | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.k += 1
        self.least = 1.0 if self.least is None else self.least * 0.9
        for group in self.param_groups:
            group["share"] = 1.0 if group["share"] is None else group["share"] * 0.5
        super().step()
        if self.k >= 7:
            self.k = 0

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state |= {"n": 0, "t": torch.tensor(-1), "h": 0.5, "slow": p.clone()}
        state["n"], state["h"] = (state["n"] + 1) % 5, state["h"] + 1
        state["t"] += 1
        p.sub_(g * group["lr"] * (self.least + group["share"] + 1 / state["h"] + 1 / (2 + state["t"]) + self.k))
        if state["n"] == 0:
            p.copy_(state["slow"].lerp_(end=p, weight=0.5))


class KeepsLists(Own):
    """Keeps tensors in lists, dictionaries and bfloat16, has checks, and computes with whole numbers in Python."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert torch.isfinite(g).all(), "an infinite gradient"
        if not state:
            state["sums"] = [torch.zeros_like(p), torch.zeros_like(p)]
            state["of"] = {0.5: torch.zeros_like(p), "last": (g.clone(),), "n": 0}
            state["past"] = deque([torch.zeros_like(p)] * 3, maxlen=3)
            state["narrow"] = torch.zeros_like(p, dtype=torch.bfloat16)
        state["of"]["n"] += 1
        count = state["of"]["n"]
        quotient, rest = divmod(count, 5)
        factor = math.log(count + 1, 2) + round(count / 3) + (count & 1) + (5 | count) + (count >> 1) + quotient + rest
        for beta, total in zip((0.5, 0.9), state["sums"], strict=True):
            total.mul_(beta).add_(copy.deepcopy(g))
        mean = state["narrow"].float() * 0.9 + g * 0.1
        state["narrow"].copy_(mean)
        state["of"] |= {0.5: state["of"][0.5] * 0.5 + g, "last": (g + state["of"]["last"][0],)}
        state["past"].append(g.clone())
        p.sub_(
            sum([*state["sums"], *state["past"], mean, state["of"][0.5], *state["of"]["last"]]) * group["lr"] / factor
        )
        p.add_(0.01, alpha=group["lr"])


class FirstApart(Own):
    """Does something else in the step that makes the state."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if state:
            p.sub_(state["mean"].lerp_(g, 0.1) * group["lr"])
        else:
            state["mean"] = torch.zeros_like(p)
            p.sub_(g.sign() * group["lr"])


class Preconditioned(Own):
    """Finds roots of matrices by their eigenvalues in every other step, as Shampoo does."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["t"], state["sum"] = 0, 1e-3 * torch.eye(len(p), dtype=p.dtype)
            state["root"] = torch.eye(len(p), dtype=p.dtype)
        state["t"] += 1
        state["sum"].addmm_(g, g.T)
        if state["t"] % 2 == 0:
            values, vectors = torch.linalg.eigh(state["sum"])
            state["root"] = vectors * values.clamp(min=1e-6) ** -0.25 @ vectors.T
        p.sub_(state["root"] @ g * group["lr"] / math.log1p(state["t"]))


class OfLists(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            torch._foreach_add_(group["params"], [p.grad for p in group["params"]], alpha=-group["lr"])


@torch.compile(backend="eager")
def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


class CallsMuch(Own):
    """Computes numbers by numpy, compares tensors, writes into rows by the count, and calls functions of lists."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"t": 0, "rows": torch.zeros(3, *p.shape, dtype=p.dtype), "last": torch.zeros_like(p)}
                state["rows"][state["t"] % 3] = p.grad
                state["t"] += 1
            states = [self.state[p] for p in group["params"]]
            means = [state["rows"].mean(0) + state["rows"][state["t"] % 3] for state in states]
            for state, mean in zip(states, means, strict=True):
                if torch.allclose(mean, state["last"], rtol=0.5) or torch.equal(mean, state["last"]):
                    mean.mul_(0.5)
                numbers = torch.tensor([1 / state["t"], 0.5], dtype=mean.dtype)
                mean.mul_(numbers.sum() * np.sqrt(state["t"]) / np.maximum(np.float64(2), state["t"]))
                state["last"].copy_(_scaled(mean, 1.0))
            powers = torch._foreach_pow(0.5, [torch.tensor(float(2)) for _ in states])
            sizes = torch._foreach_abs(means)
            torch._foreach_maximum_(sizes, 1e-3)
            torch._foreach_mul_(sizes, powers)
            torch._foreach_sqrt_(sizes)
            torch._foreach_addcdiv_(group["params"], means, sizes, [-group["lr"] for _ in states])


class DerivedSgd(optim.SGD):
    pass


class DerivedAdamW(optim.AdamW):
    pass


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.dim() == 2]


def groups(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": matrices(module)}, {"params": [p for p in module.parameters() if p.dim() != 2], "lr": 0.003}]


VARIANTS: dict[str, MakeOptimizer] = {
    "rmsprop": lambda m: optim.RMSprop(groups(m), lr=0.01, momentum=0.8, centered=True, weight_decay=0.1),
    "adagrad": lambda m: optim.Adagrad(m.parameters(), 0.05, lr_decay=0.1, initial_accumulator_value=0.2),
    "adamax": lambda m: optim.Adamax(groups(m), lr=0.02, weight_decay=0.1, betas=(0.8, 0.95)),
    "nadam": lambda m: optim.NAdam(m.parameters(), lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda m: optim.RAdam(groups(m), lr=0.02, weight_decay=0.1),
    "adadelta": lambda m: optim.Adadelta(m.parameters(), lr=1.0, weight_decay=0.1, maximize=True),
    "adafactor": lambda m: optim.Adafactor(groups(m), lr=0.05, weight_decay=0.1),
    "asgd": lambda m: optim.ASGD(m.parameters(), lr=0.05, weight_decay=0.1, t0=4, lambd=0.1),
    "rprop": lambda m: optim.Rprop(groups(m), lr=0.01, etas=(0.4, 1.3)),
    "muon": lambda m: optim.Muon(matrices(m), lr=0.01, weight_decay=0.2),
    "sgd": lambda m: DerivedSgd(m.parameters(), lr=0.1, momentum=0.9, dampening=0.3),
    "adamw": lambda m: DerivedAdamW(m.parameters(), lr=0.01, foreach=True),
    "plain_adam": lambda m: PlainAdam(groups(m)),
    "lookahead": lambda m: Lookahead(m.parameters()),
    "lamb": lambda m: Lamb(m.parameters()),
    "first_apart": lambda m: FirstApart(m.parameters()),
    "preconditioned": lambda m: Preconditioned(matrices(m)),
    "calls_much": lambda m: CallsMuch([{"params": [p], "lr": 0.03} for p in [*m.parameters()][::3]]),
    "of_lists": lambda m: OfLists(m.parameters()),
    "cycles": lambda m: Cycles(groups(m)),
    "keeps_lists": lambda m: KeepsLists(groups(m)),
    "counts_sometimes": lambda m: CountsSometimes(m.parameters()),
    "beginning": lambda m: Beginning(groups(m)),
    "schedule_free": lambda m: ScheduleFree(groups(m)),
}
QUICK = {"calls_much", "first_apart", "preconditioned", "radam", "lookahead", "schedule_free", "cycles", "keeps_lists"}
FROM_BEGINNING = {"lookahead", "first_apart"}
RULES: list[tuple[str, dict[str, Any]]] = [
    ("RMSprop", {"lr": 0.01, "momentum": 0.8, "centered": True, "weight_decay": 0.1, "alpha": 0.9}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "maximize": True}),
    ("Adadelta", {"rho": 0.8, "weight_decay": 0.1}),
    ("Adamax", {"betas": (0.8, 0.95), "weight_decay": 0.1}),
]


@pytest.mark.parametrize(
    "name, begun",
    [
        pytest.param(
            name, begun, marks=() if name in QUICK and begun == (name not in FROM_BEGINNING) else pytest.mark.long
        )
        for name in VARIANTS
        for begun in (False, True)
    ],
)
def test_updates_are_those_of_torch(name: str, begun: bool) -> None:
    """From the beginning, with a schedule of rates; or from the state that five steps leave."""
    torch.manual_seed(0)
    module, data = Mlp(), batches(UPDATES, 3)
    rates = [] if begun else [0.01 * 0.9**index for index in range(UPDATES)]
    native = train(module, VARIANTS[name], data, torch.float32, rates=rates)[1]
    exact = train(module, VARIANTS[name], data, torch.float64, rates=rates)[1]
    optimizer, done = VARIANTS[name](module), 5 if begun else 0
    for x, y in data[:done]:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    step = export_training_step(module, F.cross_entropy, data[0], optimizer, evaluation=False)
    onnx.checker.check_model(step.model, full_check=True)
    session = TrainingSession(step)
    for index, batch in enumerate(data[done:], done):
        if rates:
            session.learning_rate = rates[index]
        session.step(*batch)
    assert_trained(session.state_dict(), native, exact, UPDATES)
    if "step" in step.optimizer_state:
        # One that counts nothing itself has been stepped at least once.
        unknown = begun and name in ("sgd", "beginning", "cycles", "first_apart")
        assert session.ort_values["step"].numpy() == (1 + UPDATES - done if unknown else UPDATES)


@pytest.mark.parametrize("name", ["rprop", pytest.param("lamb", marks=pytest.mark.long)])
def test_gradients_are_accumulated_clipped_and_scaled_and_checkpoints_have_all_state(name: str, tmp_path: Any) -> None:
    torch.manual_seed(1)
    module, data = Mlp(), batches(UPDATES, 3)
    options: dict[str, Any] = {"accumulate": 2, "max_grad_norm": 0.3}
    # The first updates are skipped.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    step = export_training_step(
        module, lambda *a: 16 * F.cross_entropy(*a), data[0], VARIANTS[name](module), grad_scaler=scaler, **options
    )
    step.save(tmp_path / "step.onnx")
    session = TrainingSession(tmp_path / "step.onnx")
    skipped = 0
    while session.ort_values["step"].numpy() == 0:
        skipped += 1
        session.step(*data[0])
        session.step(*data[1])
    assert skipped > 1
    session.save(tmp_path / "state.safetensors")
    session = TrainingSession(step)
    session.load(tmp_path / "state.safetensors")
    for batch in data[2:]:
        session.step(*batch)
    twins = []
    for dtype in (torch.float32, torch.float64):
        twin = Mlp().to(dtype)
        twin.load_state_dict(module.state_dict())
        optimizer = VARIANTS[name](twin)
        for index, (x, y) in enumerate(data):
            (16 * F.cross_entropy(twin(x.to(dtype)), y) / 2).backward()  # type: ignore[no-untyped-call]
            if index % 2:
                nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
        twins.append(twin)
    native, exact = twins
    assert_trained(session.state_dict(), native, exact, UPDATES)


@pytest.mark.long
@pytest.mark.parametrize("name", ["nadam", "adafactor", "plain_adam", "lookahead"])
def test_parameters_in_float64_are_updated_in_float64(name: str) -> None:
    torch.manual_seed(0)
    module, data = Mlp().double(), [(x.double(), y) for x, y in batches(UPDATES, 3)]
    session = TrainingSession(
        export_training_step(module, F.cross_entropy, data[0], VARIANTS[name](module), evaluation=False)
    )
    for batch in data:
        session.step(*batch)
    _, reference = train(module, VARIANTS[name], data, torch.float64)
    for key, tensor in reference.state_dict().items():
        # The learning rate is an input in float32.
        assert abs(session.state_dict()[key] - tensor.numpy()).max() < UPDATES * 0.05 * 2**-24


class TakesFloat(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["t"] = state.get("t", 0) + 1
        p.sub_(g * group["lr"] / sqrt(state["t"]))


class OfAll(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g * group["lr"] / sum(q.grad.norm() for q in group["params"]))


class CountsInAttribute(Own):
    count = 0

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.count += 1
        p.sub_(g * group["lr"] / self.count)


class CountsInGroup(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        p.sub_(g * group["lr"] / group["k"])


class ChangesOption(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["lr"] *= 0.9
        p.sub_(g * group["lr"])


class LeansOnOthers(Own):
    """Takes from the second update on what others left in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, scale=1.0)

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g * group["lr"] * group["scale"])
        if p.dim() == 1:
            group["scale"] *= 0.5


class ChangesOptionLater(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            if group["k"] == 50:
                group["warm"] = True
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * (0.5 if group.get("warm") else 1.0))


class CountsBeside(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.state["k"] = torch.tensor([1])  # type: ignore[index]
        p.sub_(g * group["lr"])


class CountsForAll(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        of_all = self.state["global"]  # type: ignore[index]
        of_all["n"] = of_all.get("n", 0) + 1
        p.sub_(g * group["lr"] * (0.1 if of_all["n"] > 20 else 1.0))


class LooksUp(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        p.sub_(g * group["lr"] * {20: 0.1}.get(state["n"], 1.0))


class LooksUpText(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        p.sub_(g * group["lr"] * {"20": 0.1}.get(str(state["n"]), 1.0))


class ChangesAttributeLater(Own):
    is_late = False

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        if state["n"] == 20:
            self.is_late = True
        p.sub_(g * group["lr"] * (0.1 if self.is_late else 1.0))


class ChangesRateLater(Own):
    """Takes the rate from a gradient late, as SWATS does."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        p.sub_(g * group["lr"])
        if state["n"] > 6000 and torch.allclose(g, g.mean(), rtol=0.1):
            group["lr"] = g.norm().item()


class ClipsLate(Own):
    """Clips by a norm that small gradients do not reach, and at no learning rate is seen."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = sum((p.grad**2).sum() for p in group["params"]) ** 0.5
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * (40.0 / norm if norm > 40.0 else 1.0))


class OfAllLate(Own):
    """Looks at all gradients every tenth step, and later always."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = sum((p.grad**2).sum() for p in group["params"]) ** 0.5
            for p in group["params"]:
                self.state[p]["t"] = self.state[p].get("t", 0) + 1
                late = self.state[p]["t"] % 10 == 0 or self.state[p]["t"] > group["after"]
                p.sub_(p.grad * group["lr"] / (norm if late else 1.0))


class Projects(Own):
    """Keeps a mean in a basis of singular vectors, of which it takes others in every third step, as GaLore does."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["t"], state["mean"] = 0, torch.zeros_like(p[:1])
        if state["t"] % 3 == 0:
            state["basis"] = torch.linalg.svd(g, full_matrices=False)[0][:, :1]
        state["t"] += 1
        state["mean"].lerp_(state["basis"].T @ g, 0.1)
        p.sub_(state["basis"] @ state["mean"] * group["lr"])


class OfFirstRate(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g * self.param_groups[0]["lr"])


class CountsSometimes(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("t", 0)
        if g.abs().max() > 1e-6:
            state["t"] += 1
        p.sub_(g * group["lr"] / (1 + state["t"]))


class BeginsLater(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["t"] = state.get("t", 0) + 1
        if state["t"] == 20:
            state["mean"] = p.clone()
        p.sub_(g * group["lr"])


class Lists(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("history", []).append(g.clone())
        p.sub_(g * group["lr"])


class ByImplementation(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params, foreach=True)

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_((g.bfloat16() if group["foreach"] else g) * group["lr"])


class Loops(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["t"] = state.get("t", 0) + 1
        for _ in range(state["t"]):
            p.sub_(g * group["lr"])


class Waits(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        while g.norm() > 0.5:
            g = g * 0.9
        p.sub_(g * group["lr"])


class HasTensors(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.means = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]


class Wraps(Own):
    def __init__(self, params: Any) -> None:
        self.inner = optim.SGD(params)
        super().__init__(self.inner.param_groups)


class WrapsAlone(optim.Optimizer):
    """As it is often written: `Optimizer.__init__` does not run."""

    def __init__(self, base: optim.Optimizer) -> None:
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class TakesName(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["average"] = state.get("average", torch.zeros_like(p)) * 0.9 + p * 0.1
        p.sub_(g * group["lr"])


class Draws(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_((g + torch.randn_like(g)) * group["lr"])


class ByIdentity(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.halved = {id(self.param_groups[0]["params"][0])}

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g * group["lr"] * (0.5 if id(p) in self.halved else 1.0))


class ByAttribute(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["params"][0].halved = True

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g * group["lr"] * (0.5 if getattr(p, "halved", False) else 1.0))


class Counter:
    """Cannot be copied, as what writes a log."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0


class CountsElsewhere(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counter = Counter()

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.counter.count += 1
        p.sub_(g * group["lr"] / self.counter.count)


class NoRate(Own):
    def __init__(self, params: Any) -> None:
        optim.Optimizer.__init__(self, params, {})


@pytest.mark.parametrize(
    "make, message",
    [
        (optim.LBFGS, "LBFGS: its step needs closure; expected one of the gradients alone"),
        (optim.SparseAdam, "SparseAdam: its step fails: SparseAdam does not support dense gradients"),
        (TakesFloat, "its step takes float() of its state, its gradient or the rate"),
        (OfAll, "its step updates 'first.weight' otherwise when it has other parameters besides"),
        (CountsInAttribute, "its step changes its attribute 'count'; expected changes of state alone"),
        (CountsElsewhere, "its step changes its attribute 'counter'; expected changes of state alone"),
        (ByIdentity, "its step updates 'first.weight' otherwise than a copy of it"),
        (ByAttribute, "its step updates 'first.weight' otherwise than a copy of it"),
        (CountsInGroup, "its step updates 'first.weight' otherwise when it has other parameters besides"),
        (ChangesOption, "its step changes the option 'lr' of its parameter group; expected changes of state and"),
        (LeansOnOthers, "its step updates 'first.weight' otherwise when it has other parameters besides"),
        (ChangesOptionLater, "its step changes the option 'warm' of its parameter group in later steps; expected"),
        (lambda p: OfLists(p, None), "the lr of parameter group 0 is None; expected a number"),  # type: ignore[arg-type]
        (CountsForAll, "its step fails: it keeps 'global' in its state beside what parameters have"),
        (
            lambda p: Projects([next(p)]),
            "its step updates 'first.weight' otherwise where singular vectors or eigenvectors",
        ),
        (LooksUp, "its step looks up its count, the rate or another number in a set or a dictionary"),
        (LooksUpText, "its step takes the text of its state, its gradient or the rate"),
        (ChangesAttributeLater, "its step changes its attribute 'is_late' in later steps; expected changes of state"),
        (ChangesRateLater, "its step changes the option 'lr' of its parameter group in later steps; expected changes"),
        (ClipsLate, "its step updates 'first.weight' otherwise when it has other parameters besides"),
        (lambda p: OfAllLate(p, after=2000), "its step updates 'first.weight' otherwise when it has other parameters"),
        (lambda p: OfAllLate(p, after=10**6), "its step updates 'first.weight' otherwise when it has other parameters"),
        (lambda p: ClipsLate(p, lr=0.0), "its step updates 'first.weight' otherwise when it has other parameters"),
        (lambda p: OfFirstRate([{"params": [one]} for one in p]), "otherwise when it has other parameters besides"),
        (CountsBeside, "its step fails: it keeps 'k' in its state beside what parameters have; expected numbers in"),
        (BeginsLater, "its step changes the state 'mean' in later steps only"),
        (
            ByImplementation,
            "its step computes something else with foreach=True than with foreach=False, which is traced",
        ),
        (Lists, "state 'history' of 'first.weight' is list; expected tensors and numbers"),
        (Loops, "its step takes int() of its state"),
        (Waits, "its step asks again and again whether something holds"),
        (HasTensors, "it has tensors in its attribute 'means'"),
        (Wraps, "it wraps SGD in its attribute 'inner'; expected a step that updates the parameters itself"),
        (lambda p: WrapsAlone(optim.SGD(p)), "it wraps SGD in its attribute 'base'; expected a step that updates"),
        (TakesName, "state 'average' of 'first.weight' has a name that the step needs"),
        (NoRate, "parameter group 0 has no option 'lr'"),
    ],
)
def test_what_cannot_be_traced_is_refused(make: Callable[..., optim.Optimizer], message: str) -> None:
    module = Mlp()
    with pytest.raises(ExportError) as error:
        export_training_step(module, F.cross_entropy, batches(1, 3)[0], make(module.parameters()))
    assert message in str(error.value) and "\n" not in str(error.value)


class DecaysAll(Own):
    """Changes what has no gradient, as Muon does that makes it zeros."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"])
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_that_changes_parameters_without_a_gradient_is_refused(frozen: bool) -> None:
    module = Mlp()
    module.spare = nn.Linear(2, 2).requires_grad_(not frozen)
    with pytest.raises(ExportError, match=r"its step updates 'spare\.weight', which has no gradient; expected"):
        export_training_step(module, F.cross_entropy, batches(1, 3)[0], DecaysAll(module.parameters()))


class Aliases(Own):
    """Has two names for one tensor, or one for the parameter."""

    def __init__(self, params: Any, of_parameter: bool) -> None:
        super().__init__(params, of_parameter=of_parameter)

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
            state["again"] = p.data if group["of_parameter"] else state["m"]
        state["m"].mul_(0.9).add_(g)
        p.sub_((state["m"] + state["again"]) * group["lr"])


@pytest.mark.parametrize("of_parameter, other", [(False, "state 'm'"), (True, "the parameter")])
@pytest.mark.parametrize("begun", [False, True])
def test_state_that_shares_memory_is_refused(of_parameter: bool, other: str, begun: bool) -> None:
    """Of an optimizer that had stepped, copies with memory of their own were traced, and trained otherwise."""
    module, data = nn.Linear(4, 3), batches(1, 3)[0]
    optimizer = Aliases(module.parameters(), of_parameter)
    if begun:
        F.cross_entropy(module(data[0]), data[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with pytest.raises(ExportError, match=f"state 'again' of 'weight' shares its memory with {other}"):
        export_training_step(module, F.cross_entropy, data, optimizer)


class KeepsInClass(Own):
    """Has a list for all of its kind, whose length tells much later."""

    history: list[int] = []  # noqa: RUF012

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.history.append(1)
        p.sub_(g * group["lr"] * (0.1 if len(self.history) > 4000 else 1.0))


_steps_taken = 0


class CountsInGlobal(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        global _steps_taken
        _steps_taken += 1
        p.sub_(g * group["lr"] / _steps_taken)


def has_schedule(params: Any) -> Own:
    """Has a function that counts in a variable of its own."""
    counted = itertools.count()

    class Scheduled(Own):
        def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            p.sub_(g * group["lr"] * group["factor"]())

    return Scheduled(params, factor=lambda: 0.1 if next(counted) > 4000 else 1.0)


class SkipsSeldom(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if random.random() < 0.9999:
            p.sub_(g * group["lr"])


class SkipsLate(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["t"] = state.get("t", 0) + 1
        if state["t"] < 6000 or np.random.rand() < 0.9999:
            p.sub_(g * group["lr"])


class BeginsAnywhere(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "v" not in state:
            state["v"] = torch.empty_like(p).normal_(std=0.01 / group["lr"])
        p.sub_(state["v"].mul_(0.9).add_(g, alpha=0.1) * group["lr"])


@pytest.mark.parametrize(
    "make, message",
    [
        (KeepsInClass, "its step changes KeepsInClass.history; expected changes of state alone"),
        (CountsInGlobal, "its step changes _steps_taken; expected changes of state alone"),
        (has_schedule, "its step changes counted; expected changes of state alone"),
        (SkipsSeldom, "its step draws random numbers by Python or numpy; expected none"),
        (SkipsLate, "its step draws random numbers by Python or numpy; expected none"),
        (BeginsAnywhere, "its step draws random numbers by aten.normal_.default; expected none, or, if only the"),
    ],
)
def test_what_a_step_keeps_elsewhere_or_draws_is_refused(make: Callable[..., optim.Optimizer], message: str) -> None:
    """What comes of it is too late, or too seldom, for any comparison."""
    module = nn.Linear(4, 3)
    with pytest.raises(ExportError) as error:
        export_training_step(module, F.cross_entropy, batches(1, 3)[0], make(module.parameters()))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_only_the_first_step_draws_is_no_obstacle_later() -> None:
    torch.manual_seed(0)
    module, data = nn.Linear(4, 3), batches(4, 3)
    optimizer = BeginsAnywhere(module.parameters())
    sessions: list[TrainingSession] = []
    for index, (x, y) in enumerate(data):
        for session in sessions:
            session.step(x, y)
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not index:
            sessions = [TrainingSession(export_training_step(module, F.cross_entropy, (x, y), optimizer))]
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(sessions[0].state_dict()[name], parameter.detach().numpy(), rtol=0, atol=2.0**-20)


class OfPlaces(Own):
    """Finds something of a group by its place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.factors = [1.0, 0.5]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, factor in zip(self.param_groups, self.factors, strict=True):
            for p in group["params"]:
                # The largest by a function of two results.
                p.sub_(p.grad * group["lr"] * factor / (1.0 + p.grad.flatten().max(-1)[0]))


def test_groups_keep_their_places() -> None:
    torch.manual_seed(0)
    module, data = Mlp(), batches(4, 3)
    _, exact = train(module, lambda m: OfPlaces(groups(m)), data, torch.float64)
    _, native = train(module, lambda m: OfPlaces(groups(m)), data, torch.float32)
    session = TrainingSession(export_training_step(module, F.cross_entropy, data[0], OfPlaces(groups(module))))
    for batch in data:
        session.step(*batch)
    assert_trained(session.state_dict(), native, exact, len(data))


def test_a_learning_rate_may_be_a_tensor() -> None:
    module, data = Mlp(), batches(1, 3)
    optimizer = optim.Adam(module.parameters(), lr=torch.tensor(0.25))
    assert TrainingSession(export_training_step(module, F.cross_entropy, data[0], optimizer)).learning_rate == 0.25


class Checks(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if torch.isnan(g).any():
            raise ValueError("a gradient is NaN")
        state["sign"] = state["sign"] * 0.5 + g.sign() if "sign" in state else g.sign()
        p.sub_(state["sign"].nan_to_num() * group["lr"])


def test_where_a_step_raises_an_error_the_parameter_is_nan() -> None:
    module, (x, y) = nn.Linear(4, 3), batches(1, 3)[0]
    session = TrainingSession(
        export_training_step(module, F.cross_entropy, (x, y), Checks(module.parameters()), evaluation=False)
    )
    session.step(x, y)
    assert all(np.isfinite(array).all() for array in session.state_dict().values())
    session.step(x * math.nan, y)
    assert all(np.isnan(array).all() for array in session.state_dict().values())


def test_checkpoints_fit_exports_from_before_and_after_the_first_step(tmp_path: Any) -> None:
    module, data = nn.Linear(4, 3), batches(3, 3)
    after = copy.deepcopy(module)
    optimizer = Checks(after.parameters())
    F.cross_entropy(after(data[0][0]), data[0][1]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    fresh, begun = (
        TrainingSession(export_training_step(one, F.cross_entropy, data[0], own, evaluation=False))
        for one, own in ((module, Checks(module.parameters())), (after, optimizer))
    )
    begun.save(tmp_path / "begun.safetensors")
    fresh.load(tmp_path / "begun.safetensors")
    for session, other in ((fresh, begun), (begun, fresh)):
        session.step(*data[1])
        session.save(tmp_path / "state.safetensors")
        other.load(tmp_path / "state.safetensors")
        session.step(*data[2])
        other.step(*data[2])
        for name, array in session.state_dict().items():
            np.testing.assert_array_equal(array, other.state_dict()[name])


class OfScale(Own):
    """Keeps a number for each parameter that no step changes."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g * group["lr"] * state.setdefault("scale", 1.0))


def test_numbers_of_parameters_of_one_shape_may_differ() -> None:
    torch.manual_seed(0)
    module, data = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))), torch.randn(5, 4)
    optimizer = OfScale(module.parameters())
    for parameter, scale in zip(module.parameters(), (1.0, 3.0, 1.0), strict=True):
        optimizer.state[parameter]["scale"] = scale
    session = TrainingSession(export_training_step(module, F.mse_loss, (data, data * 2.0), optimizer))
    session.step(data, data * 2.0)
    F.mse_loss(module(data), data * 2.0).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(session.state_dict()[name], parameter.detach().numpy(), rtol=0, atol=4 * 2.0**-24)


class OfFirstOptions(Own):
    """Keeps the rate and an option that it begins with."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["rate"], state["decay"] = group["lr"], group["weight_decay"]
        p.sub_((g * state["rate"] + p * state["decay"] * group["weight_decay"]) * group["lr"])


def test_a_step_may_keep_the_options_that_it_begins_with() -> None:
    """They are inputs, and their first values are not those of the export."""
    torch.manual_seed(0)
    module, data = nn.Linear(4, 3), batches(3, 3)
    optimizer = OfFirstOptions(module.parameters(), weight_decay=0.5)
    step = export_training_step(
        module, F.cross_entropy, data[0], optimizer, evaluation=False, run_time=["weight_decay"]
    )
    session = TrainingSession(step)
    for index, (x, y) in enumerate(data):
        session.learning_rate = optimizer.param_groups[0]["lr"] = 0.5 + index
        session.weight_decay = optimizer.param_groups[0]["weight_decay"] = 0.25 + index
        session.step(x, y)
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(session.state_dict()[name], parameter.detach().numpy(), rtol=0, atol=2.0**-20)


def test_a_scheduler_that_cycles_the_momentum_is_warned_of() -> None:
    module, data = nn.Linear(4, 3), batches(1, 3)[0]
    optimizer = optim.SGD(module.parameters(), momentum=0.9)
    optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    export_training_step(module, F.cross_entropy, data, optimizer, evaluation=False, run_time=["momentum"])
    with pytest.warns(
        UserWarning, match="a scheduler cycles the momentum of parameter group 0.*or momentum in run_time"
    ):
        export_training_step(module, F.cross_entropy, data, optimizer, evaluation=False)


def test_random_numbers_in_a_step_are_refused() -> None:
    module = nn.Linear(4, 3, bias=False)
    with pytest.raises(ExportError, match=r"its step draws random numbers by aten\.randn_like"):
        export_training_step(module, F.cross_entropy, batches(1, 3)[0], Draws(module.parameters()))


class Bystander:
    """Of a class without an equality of its own."""

    def __init__(self) -> None:
        self.other = self


@pytest.mark.parametrize(
    "value",
    [Bystander(), Counter(), np.zeros(3), math.nan, torch.Generator()],
    ids=["object", "lock", "array", "nan", "generator"],
)
def test_what_a_step_does_not_touch_is_no_obstacle(value: Any) -> None:
    module = nn.Linear(4, 3)
    optimizer = PlainAdam(module.parameters(), table=np.array([1.0, 2.0]))
    optimizer.extra = value  # type: ignore[attr-defined]
    before, gradient = [p.detach().clone() for p in module.parameters()], torch.ones(3)
    module.bias.grad = gradient
    data = batches(1, 3)[0]
    step = export_training_step(module, F.cross_entropy, data, optimizer, evaluation=False)
    for parameter, values in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, values)
    assert module.bias.grad is gradient and module.weight.grad is None and not optimizer.state
    assert "bias.m" in step.optimizer_state


def test_an_optimizer_is_left_as_it_was() -> None:
    module = nn.Linear(4, 3)
    optimizer = optim.RAdam(module.parameters())
    export_training_step(module, F.cross_entropy, batches(1, 3)[0], optimizer, evaluation=False)
    assert not optimizer.state and math.sqrt(4.0) == 2.0 and not torch.compiler.is_compiling()


class Forgets(Own):
    """Asks Python, not a tensor, of which kind the count is: the trace gets another answer."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["t"] = state.get("t", 0) + 1
        p.sub_(g * group["lr"] * (1.5 if isinstance(state["t"], int) else 1.0))


def test_a_trace_that_computes_something_else_is_caught() -> None:
    module = nn.Linear(4, 3)
    with pytest.raises(ExportError, match=r"'weight' of the updating \(update 1 of random gradients\) model differs"):
        export_training_step(module, F.cross_entropy, batches(1, 3)[0], Forgets(module.parameters()))


def test_a_count_that_is_asked_for_in_another_way_is_caught_later() -> None:
    class Late(Own):
        def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            state["t"] = state.get("t", 0) + 1
            late = not isinstance(state["t"], Tensor) and state["t"] > 5000
            p.sub_(g * group["lr"] * (0.1 if late else 1.0))

    module = nn.Linear(4, 3)
    with pytest.raises(ExportError, match=r"'weight' of the updating \(update 9 of random gradients\) model differs"):
        export_training_step(module, F.cross_entropy, batches(1, 3)[0], Late(module.parameters()))


@pytest.mark.long
def test_parameters_of_16_bits_are_updated_in_float32() -> None:
    torch.manual_seed(0)
    module, data = Mlp().half(), [(x.half(), y) for x, y in batches(UPDATES, 3)]

    def make(module: nn.Module) -> optim.Optimizer:
        return optim.RMSprop(module.parameters(), lr=0.01, eps=1e-3, momentum=0.5)

    session = TrainingSession(export_training_step(module, F.cross_entropy, data[0], make(module), evaluation=False))
    for batch in data:
        session.step(*batch)
    native = train(module, make, data, torch.float16)[1].double().state_dict()
    exact = train(module, make, [(x, y) for x, y in data], torch.float64)[1].state_dict()
    for name, array in session.state_dict().items():
        assert array.dtype == np.float16
        bound = 4 * (native[name] - exact[name]).abs().max() + 2**-10 * exact[name].abs().max()
        assert abs(array.astype(np.float64) - exact[name].numpy()).max() <= bound
    with pytest.raises(ExportError, match=r"is torch\.float16, of whose rounding its step may keep account"):
        export_training_step(module, F.cross_entropy, data[0], PlainAdam(module.parameters()))


@pytest.mark.parametrize("name, options", RULES)
def test_optimizers_without_torch_are_those_of_torch(name: str, options: dict[str, Any], tmp_path: Any) -> None:
    torch.manual_seed(0)
    module, data = Mlp().eval(), batches(UPDATES, 3)
    torch.onnx.export(module, (data[0][0],), tmp_path / "model.onnx", dynamo=True, verbose=False)
    twins = {
        dtype: train(module, lambda m: getattr(optim, name)(m.parameters(), **options), data, dtype)[1]
        for dtype in (torch.float32, torch.float64)
    }
    for float64 in (True, False):
        optimizer = getattr(gradfuse.optimizers, name)(**options)
        step = gradfuse.build_training_step(
            tmp_path / "model.onnx", "cross_entropy", optimizer=optimizer, fuse=False, float64=float64
        )
        session = TrainingSession(step)
        for batch in data:
            session.step(*batch)
        assert_trained(session.state_dict(), twins[torch.float32], twins[torch.float64], UPDATES)
