"""State that a session carries between calls: truncated backpropagation through time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training.models import assert_trained

from gradfuse import ArgumentError, GradfuseError, TrainingSession, export_training_step

CALLS, RESET = 5, 3


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.rnn(x, state)
        return self.out(y), state


def loss(output: Any, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    y, (hidden, cell) = output
    return (y - target).square().mean(), {"hidden": hidden, "cell": cell, "y": y}


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6 - call % 2, 2, 3), torch.randn(6 - call % 2, 2, 2)) for call in range(CALLS)]


STATE = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
CARRIED = {"state.0": "hidden", "state.1": "cell"}


def module() -> nn.Module:
    torch.manual_seed(0)
    return Reader()


def exported(shapes: Any = (({0: "time"}, None), {0: "time"}), **options: Any) -> Any:
    reader = module()
    x, target = data()[0]
    optimizer = torch.optim.AdamW(reader.parameters(), lr=0.02)
    return export_training_step(reader, loss, ((x, STATE), target), optimizer, dynamic_shapes=shapes, **options)


def test_calls_go_on_where_the_last_one_ended(tmp_path: Path) -> None:
    step = exported().carrying(CARRIED)
    assert (step.input_names, step.output_names) == (("x",), ("y",))
    step.save(tmp_path / "step.onnx")
    session = TrainingSession(tmp_path / "step.onnx")
    losses: dict[str, list[float]] = {"float32": [], "float64": []}
    twins = []
    for dtype in (torch.float32, torch.float64):
        reader = module().to(dtype)
        optimizer, state = torch.optim.AdamW(reader.parameters(), lr=0.02), tuple(one.to(dtype) for one in STATE)
        for call, (x, target) in enumerate(data()):
            state = tuple(one.to(dtype) for one in STATE) if call == RESET else state
            output = reader(x.to(dtype), state)
            value, _ = loss(output, target.to(dtype))
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            state = tuple(one.detach() for one in output[1])
            losses[str(dtype).removeprefix("torch.")].append(float(value.detach()))
        twins.append(reader)
    actual = []
    for call, (x, target) in enumerate(data()):
        if call == RESET:
            session.reset_carried()
        if call == 2:
            # A checkpoint has the state too.
            session.save(tmp_path / "state.safetensors")
            session = TrainingSession(tmp_path / "step.onnx")
            session.load(tmp_path / "state.safetensors")
        actual.append(session.step(x, target))
    assert_trained(session.state_dict(), twins[0], twins[1], CALLS)
    own = np.abs(np.subtract(losses["float32"], losses["float64"])).max()
    assert np.abs(np.subtract(actual, losses["float64"])).max() <= 8 * own + CALLS * np.finfo(np.float32).eps
    assert session.evaluate(data()[0][0])[0].shape == (6, 2, 2)


def test_it_begins_at_values_of_ones_own() -> None:
    begin = np.full((1, 2, 4), 0.5, np.float32)
    step = exported(evaluation=False)
    x, target = data()[0]
    wanted = TrainingSession(step).step((x, (begin, np.zeros_like(begin))), target)
    session = TrainingSession(step.carrying(CARRIED, {"state.0": begin}))
    assert session.step(x, target) == wanted


@pytest.mark.parametrize(
    ("state", "begin", "text"),
    [
        ({}, None, "state is {}; expected a dictionary: input -> output"),
        ({"h": "hidden"}, None, "'h' is no input of the batch; expected one of 'x', 'state.0', 'state.1'"),
        ({"state.0": "h"}, None, "'h' is no output of the step; expected one of 'hidden', 'cell', 'y'"),
        ({"x": "y"}, None, "'x' has the shape [time,2,3]; expected sizes that do not vary"),
        (
            {"state.0": "y", "state.1": "cell"},
            None,
            "'y' is FLOAT of shape [time,2,2]; expected FLOAT of shape [1,2,4]",
        ),
        ({"state.0": "hidden"}, None, "a part of 'state' is carried, and 'state.1' are not; expected all or none"),
        (CARRIED, {"state.0": np.zeros(4)}, "begin of 'state.0' is float64 of shape [4]; expected FLOAT of shape"),
        (CARRIED, {"x": np.zeros(4)}, "begin has 'x'; expected inputs that are carried, 'state.0', 'state.1'"),
    ],
)
def test_what_cannot_be_carried_is_refused(plain: Any, state: Any, begin: Any, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        plain.carrying(state, begin)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def plain() -> Any:
    return exported(evaluation=False)


def test_attributes_that_a_session_does_not_have(plain: Any) -> None:
    session = TrainingSession(plain)
    with pytest.raises(AttributeError, match="TrainingSession has no attribute 'lr'; expected 'learning_rate'"):
        session.lr = 0.1
    with pytest.raises(GradfuseError, match="reset_carried: the step carries nothing"):
        session.reset_carried()
