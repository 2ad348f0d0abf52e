"""What a step gives beside its loss, losses that modules compute themselves, and gradients of the batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import ExportError, GradfuseError, TrainingSession, export_training_step
from gradfuse.testing import assert_gradients_close

UPDATES = 4
SHAPES = ({0: "batch"}, {0: "batch"})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


def measured(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.cross_entropy(output, target)
    return loss, {"accuracy": (output.argmax(1) == target).float().mean(), "logits": output, "total": loss}


def data(count: int = UPDATES) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8 - n, 4), torch.randint(0, 3, (8 - n,))) for n in range(count)]


def of_torch(
    module: nn.Module, optimizer: Any, dtype: torch.dtype, max_grad_norm: float | None
) -> list[dict[str, Tensor]]:
    """All losses, outputs and gradients of inputs of a training in PyTorch."""
    module = copy.deepcopy(module).to(dtype)
    optimizer, results = optimizer(module.parameters()), []
    for x, target in data():
        x = x.to(dtype).requires_grad_()
        optimizer.zero_grad()
        loss, outputs = measured(module(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
        optimizer.step()
        assert x.grad is not None
        results.append({"x.grad": x.grad, **{name: one.detach() for name, one in outputs.items()}})
    return results


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.02), {}),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), {"fuse": False}),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), {"max_grad_norm": 0.5}),
    ],
)
@pytest.mark.sampled(every=2)
def test_outputs_and_gradients_of_inputs_are_those_of_torch(
    optimizer: Callable[..., torch.optim.Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Net()
    step = export_training_step(
        module,
        measured,
        data()[0],
        optimizer(module.parameters()),
        dynamic_shapes=SHAPES,
        input_gradients=["x"],
        **options,
    )
    assert step.output_names == ("accuracy", "logits", "total", "x.grad")
    step.save(tmp_path / "step.onnx")
    session = TrainingSession(tmp_path / "step.onnx")
    norm = options.get("max_grad_norm")
    natives, exacts = (of_torch(module, optimizer, dtype, norm) for dtype in (torch.float32, torch.float64))
    kept = []
    for (x, target), native, exact in zip(data(), natives, exacts, strict=True):
        loss = session.step(x, target)
        kept.append(session.outputs)
        assert loss == kept[-1]["total"]
        assert kept[-1]["accuracy"] == exact["accuracy"]
        for name in ("logits", "total", "x.grad"):
            terms = UPDATES * max(1.0, float(exact[name].abs().max()))
            assert_gradients_close(kept[-1][name], native[name], exact[name], np.float32, terms=terms)
    # Those of earlier steps stay as they were.
    assert [one["logits"].shape[0] for one in kept] == [len(x) for x, _ in data()]
    assert len({float(one["total"]) for one in kept}) == UPDATES


@dataclasses.dataclass
class Result:
    loss: Tensor | None
    logits: Tensor


class Own(Net):
    """Computes its loss itself, as models of transformers do where they are given labels."""

    def __init__(self, form: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(x)
        return self.form(None if labels is None else F.cross_entropy(logits, labels), logits)


def updated(module: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Update a module by SGD; return the loss."""
    loss: Tensor = module(x, labels)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.data.sub_(0.1 * gradient)
    return loss.detach()


@pytest.mark.parametrize(
    "form",
    [
        lambda loss, logits: loss,
        lambda loss, logits: (loss, logits),
        lambda loss, logits: {"logits": logits, "loss": loss},
        Result,
    ],
)
@pytest.mark.sampled(every=2)
def test_a_module_computes_its_loss_itself(form: Callable[[Any, Any], Any]) -> None:
    torch.manual_seed(0)
    module = Own(form)
    x, labels = data()[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    session = TrainingSession(export_training_step(module, None, {"x": x, "labels": labels}, optimizer))
    twin = copy.deepcopy(module)
    twin.form = lambda loss, logits: loss
    twins = (twin, torch.float32), (copy.deepcopy(twin).double(), torch.float64)
    for _ in range(UPDATES):
        native_loss, exact_loss = (updated(one, x.to(dtype), labels) for one, dtype in twins)
        actual = session.step({"x": x, "labels": labels})
        assert_gradients_close(np.float32(actual), native_loss, exact_loss, np.float32, terms=UPDATES)


def test_a_loss_of_the_module_gives_outputs_too() -> None:
    module = Own(lambda loss, logits: (loss, {"logits": logits}))
    x, labels = data()[0]
    session = TrainingSession(export_training_step(module, None, ((x, labels), None)))
    session.step((x, labels))
    assert session.outputs["logits"].shape == (len(x), 3)


X, TARGET = data()[0]
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "a name that is taken": (
        lambda y, t: (y.mean(), {"first.weight": y}),
        (X, TARGET),
        {},
        "loss returns an output 'first.weight', a name that the step has already; expected another one",
    ),
    "a number": (
        lambda y, t: (y.mean(), {"n": 3}),
        (X, TARGET),
        {},
        "loss returns int as the output 'n'; expected a tensor; give it as torch.tensor(3)",
    ),
    "a tuple of tensors": (
        lambda y, t: (y.mean(), y),
        (X, TARGET),
        {},
        "loss returns tuple; expected a tensor of one element, or (such a tensor, a dictionary of others by name)",
    ),
    "targets without a loss": (
        None,
        (X, TARGET),
        {},
        "loss is None, and the batch has targets, target; expected them in its inputs",
    ),
    "no loss of the module": (None, {"x": X}, {}, "loss returns Tensor of shape (8, 3); expected a tensor of one"),
    "an unknown input": (
        measured,
        (X, TARGET),
        {"input_gradients": ["image"]},
        "input_gradients has 'image'; expected names among 'x', 'target'",
    ),
    "labels": (
        measured,
        (X, TARGET),
        {"input_gradients": ["target"]},
        "input_gradients has 'target', which is torch.int64; expected a floating type",
    ),
    "an input that does not matter": (
        lambda y, t, unused: F.cross_entropy(y, t),
        (X, (TARGET, torch.ones(2))),
        {"input_gradients": ["unused"]},
        "the loss does not depend on 'unused', whose gradient is asked for; expected that it does",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_one_clear_line(name: str) -> None:
    loss, batch, options, text = REFUSED[name]
    with pytest.raises(ExportError) as caught:
        export_training_step(Net(), loss, batch, **options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_outputs_that_are_not_there() -> None:
    plain = TrainingSession(export_training_step(Net(), lambda y, t: F.cross_entropy(y, t), (X, TARGET)))
    plain.step(X, TARGET)
    with pytest.raises(GradfuseError, match="outputs: the step gives nothing but its loss"):
        _ = plain.outputs
    session = TrainingSession(export_training_step(Net(), measured, (X, TARGET)))
    with pytest.raises(GradfuseError, match="outputs: no step was run"):
        _ = session.outputs
