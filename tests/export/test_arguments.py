"""Batches as modules take them: nested, by name, with None; and what sessions take of such a step."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from like_torch import assert_like_torch, called
from torch import Tensor, nn
from torch.utils import _pytree

from gradfuse import ArgumentError, ExportError, TrainingSession, TrainingStep, export_training_step
from gradfuse.testing import assert_gradients_close


@dataclasses.dataclass
class Output:
    """As transformers' models give it, but of a class that PyTorch was not told of."""

    y: Tensor
    hidden: Any = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(
        self, x: Tensor, hidden: Any, extra: dict[str, Any] | None = None, *, scale: Any = None, whole: bool = False
    ) -> Any:
        y, hidden = self.rnn(x, hidden)
        y = self.out(y)
        if extra is not None:
            y = y * extra["masks"][0]
        y = y if scale is None else y * scale
        return Output(y, hidden) if whole else (y, hidden)


def loss(output: Any, target: Any = 0.0) -> Tensor:
    y = output.y if isinstance(output, Output) else output[0]
    target = target["of_y"][0] if isinstance(target, dict) else target
    return (y - target).square().mean()  # type: ignore[no-any-return]


def outputs(module: nn.Module, inputs: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """All tensors that the module gives in a type."""
    inputs = _pytree.tree_map_only(Tensor, lambda x: x.to(dtype), inputs)
    with torch.no_grad():
        output = called(copy.deepcopy(module).to(dtype), (), inputs)
    y, hidden = (output.y, output.hidden) if isinstance(output, Output) else output
    return y, *hidden


def sequences(items: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    return torch.randn(5, items, 3), (torch.randn(1, items, 4), torch.randn(1, items, 4)), torch.randn(5, items, 2)


X, HIDDEN, Y = sequences(2)
MASK = torch.rand(5, 2, 1)

BATCHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a tuple within": (((X, HIDDEN), Y), ("x", "hidden.0", "hidden.1")),
    "None": (((X, HIDDEN, None), Y), ("x", "hidden.0", "hidden.1")),
    "a dictionary and a list": (
        ((X, list(HIDDEN), {"masks": [MASK], "other": None}), Y),
        ("x", "hidden.0", "hidden.1", "extra.masks.0"),
    ),
    "by name": (
        ({"x": X, "hidden": HIDDEN, "scale": torch.tensor(2.0), "whole": True}, Y),
        ("x", "hidden.0", "hidden.1", "scale"),
    ),
    "nested targets": (((X, HIDDEN), ({"of_y": (Y, None)},)), ("x", "hidden.0", "hidden.1")),
    "no targets": (((X, HIDDEN), None), ("x", "hidden.0", "hidden.1")),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.sampled(every=2)
def test_steps_take_what_the_module_takes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Net()
    batch, names = BATCHES[name]
    step = export_training_step(module, loss, batch, evaluation=True)
    assert step.input_names == names
    step.save(tmp_path / "step.onnx")
    step = TrainingStep.load(tmp_path / "step.onnx")
    assert_like_torch(step, module, loss, batch)
    results = TrainingSession(step).evaluate(batch[0])
    for result, native, exact in zip(
        results, outputs(module, batch[0], torch.float32), outputs(module, batch[0], torch.float64), strict=True
    ):
        assert_gradients_close(result, native, exact, np.float32, terms=4.0)


def test_a_flag_is_left_out_only_where_the_module_has_it_by_default() -> None:
    torch.manual_seed(0)
    scale, sessions = torch.tensor(2.0), {}
    for whole in (True, False):
        batch = {"x": X, "hidden": HIDDEN, "scale": scale, "extra": None, "whole": whole}, Y
        sessions[whole] = TrainingSession(export_training_step(Net(), loss, batch, evaluation=False))
    short = {"x": X, "hidden": HIDDEN, "scale": scale}
    assert np.isfinite(sessions[False].step(short, Y))
    with pytest.raises(ArgumentError, match="inputs lack 'whole'; expected True, as in the exported step"):
        sessions[True].step(short, Y)


@pytest.mark.parametrize(
    "shapes",
    [
        (({1: "items"}, ({1: "items"}, {1: "items"})), {1: "items"}),
        ({"x": {1: "items"}, "hidden": ({1: "items"}, {1: "items"})}, {1: "items"}),
        {"x": {1: "items"}, "hidden.0": {1: "items"}, "hidden.1": {1: "items"}, "target": {1: "items"}},
        {"x": {1: "items"}, "hidden": ({1: "items"}, {1: "items"}), "target": {1: "items"}},
    ],
)
@pytest.mark.sampled(every=3)
def test_axes_of_nested_inputs_vary(shapes: Any) -> None:
    torch.manual_seed(0)
    module = Net()
    step = export_training_step(module, loss, ((X, HIDDEN), Y), dynamic_shapes=shapes)
    x, hidden, y = sequences(3)
    assert_like_torch(step, module, loss, ((x, hidden), y))


def test_what_the_axes_do_not_fit() -> None:
    with pytest.raises(ExportError, match="dynamic_shapes of 'hidden' is dict; expected 2 parts, as the batch has"):
        export_training_step(Net(), loss, ((X, HIDDEN), Y), dynamic_shapes=((None, {1: "items"}), None))


@pytest.mark.parametrize(
    "batch, message",
    [
        (((X,), Y), "module does not take the inputs of the batch, x: missing a required argument: 'hidden'; exp"),
        (((X, HIDDEN), (Y, Y)), "loss does not take the targets of the batch, target, target_1: too many positional"),
        (((X, HIDDEN, 2.0), Y), "inputs of the batch hold float; expected tensors, as torch.tensor(x)"),
        (((X, (X, object())), Y), "inputs of the batch hold object; expected tensors"),
        (
            ((X, Output(X)), Y),
            "inputs of the batch hold Output; expected tensors: call torch.export.register_dataclass(Output)",
        ),
    ],
)
def test_what_a_batch_cannot_be(batch: Any, message: str) -> None:
    with pytest.raises(ExportError) as error:
        export_training_step(Net(), loss, batch)
    assert message in str(error.value)
