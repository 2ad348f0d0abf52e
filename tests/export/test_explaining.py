"""What an export cannot do is said in terms of the user's code: the place, the operator or the axis, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import ExportError, export_training_step

DYNAMIC = ({0: "batch"},), ({0: "batch"},)


class Head(nn.Module):
    """A linear layer, and what is done with its output."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x))


def takes_a_number_out(h: Tensor) -> Tensor:
    return h + torch.zeros(int(h.sum().item()) % 3 + 1).sum()


def loops_over_a_count(h: Tensor) -> Tensor:
    positive = (h > 0).sum().item()
    return sum((h for _ in range(int(positive))), start=h)


def decides_by_a_count(h: Tensor) -> Tensor:
    return h + 1.0 if h[h[:, 0] > 0].shape[0] > 2 else h


def calls_numpy(h: Tensor) -> Tensor:
    return h * torch.from_numpy(h.detach().numpy()).mean()


def has_no_translation(h: Tensor) -> Tensor:
    return h - h.median()


def computes_complex_numbers(h: Tensor) -> Tensor:
    return torch.fft.fft(h).abs()


def fixes_the_batch(h: Tensor) -> Tensor:
    return h.view(4, 5) * 1.0


def multiplies_wrongly(h: Tensor) -> Tensor:
    return h @ torch.zeros(4, 6)


@pytest.mark.parametrize(
    "then, said",
    [
        (takes_a_number_out, ["numbers that it takes out of tensors", "expected sizes and branches that follow from"]),
        (loops_over_a_count, ["numbers that it takes out of tensors", "expected sizes and branches that follow from"]),
        (decides_by_a_count, ["numbers that it takes out of tensors", "expected sizes and branches that follow from"]),
        (calls_numpy, [".numpy() is not supported"]),
        (has_no_translation, ["aten.median.default", "no ONNX translation", "expected other operators"]),
        (computes_complex_numbers, ["aten._fft_r2c.default", "complex numbers", "expected real ones"]),
        (fixes_the_batch, ["axis 0 of 'x' has size 4", "expected code for any size, or this axis static"]),
        (multiplies_wrongly, ["fails on the batch", "mat1 and mat2 shapes cannot be multiplied"]),
    ],
)
def test_a_refusal_names_the_users_line(
    then: Callable[[Tensor], Tensor], said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    lines, first = inspect.getsourcelines(then)
    with pytest.raises(ExportError) as caught:
        export_training_step(Head(then), F.cross_entropy, (torch.randn(4, 6), torch.arange(4)), dynamic_shapes=DYNAMIC)
    text = str(caught.value)
    assert all(part in text for part in said), text
    places = [f"{then.__name__} (test_explaining.py:{first + offset})" for offset in range(1, len(lines))]
    assert any(place in text for place in places), text
    # What torch writes for its own developers.
    for noise in ("TORCH_LOGS", "TORCHDYNAMO", "C++", "/torch/", "gradfuse/", "draft_export", "unhinted"):
        assert noise not in text
    assert capfd.readouterr() == ("", "")
