"""Functions of Python's numbers take dynamic sizes, and give what they give for the numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from like_torch import assert_like_torch, trains_like_torch
from torch import Tensor, nn

from gradfuse import ExportError, GradfuseError, TrainingSession, export_training_step


class Between(nn.Module):
    """A function of sequences behind a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(torch.tanh(self.layer(x))).sum(1)


def _batch(items: int, length: int) -> Any:
    torch.manual_seed(length)
    return (torch.randn(items, length, 4),), (torch.randn(items, 4),)


def _windows(h: Tensor) -> Tensor:
    """As Swin and its like partition pictures, and put them together again."""
    rows = h[:, :4].reshape(-1, 2, 4)
    items = int(rows.shape[0] / (4 * 4 / 4 / 2))
    return rows.cumsum(1).view(items, 2, 2, -1).flatten(1, 2)


def _kept(h: Tensor) -> Tensor:
    """As masked autoencoders keep a share."""
    kept = int(h.shape[1] * (1 - 0.75))
    return h[:, :kept] * float(kept)


def _share(h: Tensor) -> Tensor:
    """0.29 times 100 is below 29."""
    return h[:, : int(0.29 * h.shape[1])]


def _scaled(h: Tensor) -> Tensor:
    items, length = float(len(h)), h.size(1)
    result: Tensor = h / math.sqrt(length) * np.log(length) / items + math.exp(-length)
    return result


def _lengths(h: Tensor) -> Tensor:
    """As code for CTC says how long sequences are."""
    lengths = torch.IntTensor([h.size(1)] * h.size(0))
    return h * (1 / lengths)[:, None, None] + torch.Tensor([h.size(1)]) * h.square()


def _joined(h: Tensor) -> Tensor:
    """As capsules repeat their weights."""
    row, rows = torch.linspace(0.5, 1.5, 4), [1, h.size(1) // 2]
    weights = torch.cat([row[None]] * h.size(0), dim=0) + torch.stack([row] * len(h))
    result: Tensor = h * weights[:, None] * torch.tensor(rows)[0] * torch.tensor([[2.0]] * h.size(1))
    return result


def _divided(h: Tensor) -> Tensor:
    parts, rest = divmod(h.shape[1], 2)
    result: Tensor = h[:, rest:].reshape(h.shape[0], parts, 2, 4).prod(2) + np.ceil(h.shape[1] / 2)
    return result


def _of_a_product(h: Tensor) -> Tensor:
    """Of floats, 1 / 49 * 49 is less than 1."""
    return h * int(h.shape[1] / 49 * 49)


def _rounded(h: Tensor) -> Tensor:
    """Halves are rounded to even numbers."""
    result: Tensor = h[:, : round(h.shape[1] / 8) + (h.shape[1] >> 2)] * (h.shape[0] << 1)
    result = result * ((h.shape[1] / 2) % 3 - (h.shape[0] * 0.5) % 1.0) + int(np.round(h.shape[1] * 0.3))
    return result


def _of_math(h: Tensor) -> Tensor:
    n = h.shape[1]
    result: Tensor = h * math.sin(n) * math.log(n, 512) + math.tanh(n / 10) * math.hypot(n, 3) - math.fmod(n, 5)
    result = result[:, : math.isqrt(n)] + np.minimum(n, 9) * math.cos(math.pi / n)
    return result


def _between_sizes(h: Tensor) -> Tensor:
    n = h.shape[1]
    bounded = F.hardtanh(h, -1 / n, n / 20) + F.leaky_relu(h, 1 / n) + F.elu(h, n / 6)
    return bounded * torch.pow(h.abs() + 1.0, n / 10)


def _tapered(h: Tensor) -> Tensor:
    n = h.shape[1]
    windows = torch.hann_window(n) * torch.hamming_window(n, periodic=False) + torch.bartlett_window(n)
    return h * (windows - torch.blackman_window(n) + torch.linspace(0.5, 2.0, n)).to(h.dtype)[:, None]


def _pairs(h: Tensor) -> Tensor:
    """As factorisation machines multiply each two."""
    i, j = torch.triu_indices(h.shape[1], h.shape[1], 1)
    k, m = torch.tril_indices(h.shape[1], h.shape[1])
    return (h[:, i] * h[:, j]).mean(1, keepdim=True) + h[:, k] * h[:, m].square()


def _around(h: Tensor) -> Tensor:
    """Places that wrap, bits of them, and a class for each, as contrastive losses count."""
    n = h.shape[1]
    places = torch.arange(n)
    factor = (places + n // 2) % n + torch.remainder(places - 5, n / 3) + (places & (n - 1))
    return F.one_hot((places * 3) % n, n).to(h.dtype) @ (h * factor[:, None])


def _nested(h: Tensor) -> Tensor:
    """Functions and lists of the function."""

    def last() -> int:
        return (lambda: int(h.shape[1] * 0.7))()

    parts = [h[:, : int(h.shape[1] * share)].sum(1, keepdim=True) for share in (0.25, 0.5)]
    return h[:, -last() :] * parts[0] + parts[1]


FUNCTIONS = [_around, _nested, _windows, _kept, _share, _scaled, _lengths, _joined, _divided, _of_a_product]
FUNCTIONS += [_rounded, _of_math, _between_sizes, _tapered, _pairs]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.sampled(every=4)
def test_functions_of_numbers_take_sizes(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = Between(function)
    code = function.__code__
    shapes: Any = ({0: "batch", 1: "length"},), ({0: "batch"},)
    step = export_training_step(module, F.mse_loss, _batch(3, 12), dynamic_shapes=shapes, fuse=False)
    lengths = [(5, 100), (2, 49), (7, 9), *([(3, 1)] if function is _tapered else [])]
    for items, length in lengths:
        assert_like_torch(step, module, F.mse_loss, _batch(items, length))
    assert function.__code__ is code and "gradfuse_numbers" not in globals()


def _by_length(output: Tensor, target: Tensor, power: int) -> Tensor:
    return (output - target).pow(power).sum() / max(1, len(output))


def test_functions_that_another_one_has_made_take_sizes() -> None:
    """As a loss that is defined in `main`, or a model in a function that makes it."""

    def share(h: Tensor) -> Tensor:
        parts = [h[:, : int(h.shape[1] * one)].sum(1, keepdim=True) for one in (0.25, 0.5)]
        return h[:, : int(h.shape[1] * 0.5)] * parts[0] + parts[1] * max(1, len(h))

    torch.manual_seed(0)
    module = Between(share)
    shapes: Any = ({0: "batch", 1: "length"},), ({0: "batch"},)
    step = export_training_step(module, F.mse_loss, _batch(3, 12), dynamic_shapes=shapes, fuse=False)
    assert_like_torch(step, module, F.mse_loss, _batch(5, 9))


def test_the_length_of_a_tensor_is_a_size_in_other_packages_too() -> None:
    """Those of module and loss have `len` replaced, but a partial function is of none."""
    torch.manual_seed(0)
    module, loss = nn.Linear(4, 4), functools.partial(_by_length, power=2)
    batches = [((torch.randn(items, 4),), (torch.randn(items, 4),)) for items in (3, 5)]
    step = export_training_step(module, loss, batches[0], dynamic_shapes=(({0: "n"},), ({0: "n"},)))
    assert_like_torch(step, module, loss, batches[1])


def test_a_size_of_one_is_compared_with_torch() -> None:
    """The mean of nothing is 0 in onnxruntime, and no number in PyTorch."""
    module = Between(lambda h: h * h[:, 1:].mean())
    shapes: Any = ({0: "batch", 1: "length"},), ({0: "batch"},)
    session = TrainingSession(export_training_step(module, F.mse_loss, _batch(3, 8), dynamic_shapes=shapes))
    (x,), (target,) = _batch(3, 1)
    with pytest.raises(GradfuseError, match="axis 1 of 'x' out of range, expected at least 2"):
        session.step(x, target)


class Windows(nn.Module):
    """Parts a picture in windows; how many there are divides the sizes of views, and small pictures have none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        items, channels, height, width = x.shape
        parts = x.view(items, channels, height // 4, 4, width // 4, 4).permute(0, 2, 4, 3, 5, 1)
        rows = torch.tanh(self.layer(parts.reshape(-1, 16, channels)))
        return rows.view(items, height // 4 * (width // 4), -1).mean(1)


def test_sizes_by_which_nothing_may_be_divided_are_not_tried() -> None:
    def batch(items: int, height: int, width: int) -> Any:
        torch.manual_seed(height)
        return (torch.randn(items, 3, height, width),), (torch.randn(items, 64),)

    dynamic = (({0: "items", 2: "height", 3: "width"},), ({0: "items"},))
    module = Windows()
    step = export_training_step(module, F.mse_loss, batch(2, 16, 20), dynamic_shapes=dynamic)
    assert_like_torch(step, module, F.mse_loss, batch(3, 12, 8))


def _listed(h: Tensor) -> Tensor:
    return h * torch.tensor(sorted([2.0] * h.size(1)))[:, None]


def test_a_list_that_is_as_long_as_a_size_is_refused_where_it_goes_elsewhere() -> None:
    shapes: Any = ({1: "length"},), (None,)
    with pytest.raises(ExportError, match=r"axis 1 of 'x' has size 12 in all of the traced step, by _listed \("):
        export_training_step(Between(_listed), F.mse_loss, _batch(3, 12), dynamic_shapes=shapes)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.layer(x[:, : int(x.shape[1] / 2)]).sum(1)  # type: ignore[no-any-return]
        return self.layer(x[:, : int(x.shape[1] * 0.75)]).sum(1)  # type: ignore[no-any-return]


@pytest.mark.long
def test_evaluation_models_take_sizes_too() -> None:
    module = Keeping()
    shapes: Any = ({1: "length"},), (None,)
    step = export_training_step(module, F.mse_loss, _batch(3, 12), dynamic_shapes=shapes, evaluation=True, fuse=False)
    assert step.evaluation_model is not None
    (x,), _ = _batch(3, 31)
    np.testing.assert_allclose(TrainingSession(step).evaluate(x), module.eval()(x).detach(), rtol=1e-5, atol=1e-6)


class Queue(nn.Module):
    """As momentum contrast keeps keys of earlier batches, at a pointer."""

    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("queue", torch.linspace(-1.0, 1.0, 24).view(4, 6))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        keys: Tensor = self.layer(x)
        scores: Tensor = keys @ self.queue.clone().detach()
        first = int(self.pointer)
        with torch.no_grad():
            self.queue[:, first : first + len(keys)] = keys.T
            self.pointer[0] = (first + len(keys)) % 6
        shifted = torch.roll(scores, -int(scores.detach().mean(0).argmax()), 1)
        return shifted / math.sqrt(scores.detach().square().sum())


def test_numbers_in_tensors_are_computed_with() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Queue()

    batches = [((torch.randn(2, 4),), (torch.randn(2, 6),)) for _ in range(4)]
    session = trains_like_torch(make, F.mse_loss, batches, fuse=False)
    assert session.state_dict()["pointer"].tolist() == [2]
