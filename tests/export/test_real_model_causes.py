"""What code of transformers does that torch.export or ONNX alone stop at, each beside what is almost the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from like_torch import trains_like_torch
from onnx import numpy_helper
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import ExportError, export_training_step
from gradfuse.testing import assert_gradients_close

BATCH = ({0: "batch"},), ({0: "batch"},)
LENGTH = ({0: "batch", 1: "length"},), ({0: "batch"},)
WIDTH, CLASSES = 6, 5


class Layer(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).mean(1) if x.dim() == 3 else self.function(self.layer(x))


def _batch(items: int, *length: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return (torch.randn(items, *length, WIDTH),), (torch.arange(items) % CLASSES,)


def _compared(module: nn.Module, batch: Any, others: Any, dynamic_shapes: Any = BATCH) -> None:
    """Export a step with one batch, and compare it with PyTorch on others."""
    step = export_training_step(module, F.cross_entropy, batch, dynamic_shapes=dynamic_shapes)
    for other in others:
        results = run(step, other, kernels=False)
        native, exact = (
            autograd(module, F.cross_entropy, other, dtype, step) for dtype in (torch.float32, torch.float64)
        )
        for name, result in results.items():
            terms = 8 * max(np.abs(array).max() for array in exact.values())
            assert_gradients_close(result, native[name], exact[name], result.dtype, terms=terms)


class Settings(nn.Module):
    """Divides its input as integers in buffers say."""

    grid: Tensor
    flag: Tensor
    calls: Tensor

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("grid", torch.tensor([[1, 2], [2, 2]]))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("calls", torch.tensor(1))
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls.add_(1)
            counted: Tensor = self.layer(x) + x[:, : int(self.calls)].sum(1, keepdim=True)
            return counted
        first, second = self.layer(x).split((self.grid[:, 0] * self.grid[:, 1]).tolist(), 1)
        ends = F.pad(self.grid.prod(1).cumsum(0), (1, 0))
        parts = [x[:, ends[i] : ends[i + 1]].sum(1, keepdim=True) for i in range(len(ends) - 1)]
        if self.flag:
            parts = parts[::-1]
        chosen = self.grid.flatten()[torch.tensor([True, False, True, True]).nonzero()[:, 0]]
        return torch.cat([second * parts[0], first * parts[1]], 1) * chosen.sum()


def test_numbers_in_buffers_that_no_step_changes_are_known() -> None:
    torch.manual_seed(0)
    _compared(Settings(), _batch(3), [_batch(7)])


class Positions(nn.Module):
    """Slices a buffer to the number of tokens, as BERT and its variants do."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(16, WIDTH)
        self.register_buffer("places", torch.arange(16).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x) + self.table(self.places[:, : x.shape[1]])
        return hidden.tanh().mean(1)


def test_parts_of_buffers_by_dynamic_sizes_stay_dynamic() -> None:
    torch.manual_seed(0)
    _compared(Positions(), _batch(3, 4), [_batch(5, 7)], LENGTH)


def test_numbers_in_a_buffer_that_changes_are_those_of_each_step() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Settings(counts=True)

    batches = [_batch(items) for items in (3, 5, 3)]
    session = trains_like_torch(make, F.cross_entropy, batches, dynamic_shapes=BATCH, fuse=False)
    assert session.state_dict()["calls"] == 4


def _blocks(x: Tensor) -> Tensor:
    """Attends within whole blocks of 4, to which it pads."""
    length = x.shape[1]
    missing = (4 - length % 4) % 4
    padded = F.pad(x, (0, 0, 0, missing))
    blocks = padded.reshape(x.shape[0], -1, 4, WIDTH)
    mixed = (blocks @ blocks.transpose(-1, -2)).softmax(-1) @ blocks
    mixed = mixed.reshape(x.shape[0], -1, WIDTH)
    return mixed[:, :length] if missing > 0 else mixed


def _other_for_blocks(x: Tensor) -> Tensor:
    """Treats whole blocks otherwise."""
    return x * 2.0 if x.shape[1] % 4 == 0 else x.tanh()


@pytest.mark.parametrize("length", [8, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.long
def test_code_that_pads_to_blocks_exports_for_any_length(length: int) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*multiple")
        _compared(Layer(_blocks), _batch(3, length), [_batch(5, one) for one in (8, 9, 11, 12)], LENGTH)


@pytest.mark.long
def test_code_that_treats_whole_blocks_otherwise_exports_for_these() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="is taken to be a multiple of 4"):
        _compared(Layer(_other_for_blocks), _batch(3, 8), [_batch(5, 12)], LENGTH)


def _masked(x: Tensor) -> Tensor:
    """Masks as transformers makes them: a function of two places, mapped over all of them."""

    def allowed(row: Tensor, column: Tensor) -> Tensor:
        return row.new_ones((), dtype=torch.bool) & (column <= row)

    places = torch.arange(x.shape[1])
    mask = torch.vmap(torch.vmap(allowed, (None, 0)), (0, None))(places, places)
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ x


def test_masks_mapped_by_vmap() -> None:
    torch.manual_seed(0)
    _compared(Layer(_masked), _batch(3, 4), [_batch(5, 7)], LENGTH)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
@pytest.mark.sampled(every=2)
def test_small_integers(dtype: torch.dtype) -> None:
    numbers = torch.tensor([3, 100, 7, 0, 11, 120], dtype=dtype)

    def function(x: Tensor) -> Tensor:
        # 100 ** 2 wraps around in 8 bits.
        powers, chosen = numbers**2, torch.where(x > 0, numbers, numbers + 1)
        return x * powers / 1000.0 + torch.maximum(chosen, numbers - 1) / 100.0

    torch.manual_seed(0)
    _compared(Layer(function), _batch(3), [_batch(7)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_beside_16_bits_are_not_rounded_first(dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        # 0.1 is no number of 16 bits, 0.5 is one.
        return x + (x.to(dtype) * 0.1 * 0.5).to(x.dtype)

    torch.manual_seed(0)
    # What a fused loss rounds otherwise, 16 bits show.
    export_training_step(Layer(function), F.cross_entropy, _batch(3), dynamic_shapes=BATCH, fuse=False)


@pytest.mark.parametrize("keepdim", [False, True])
def test_extremes_of_all_elements(keepdim: bool) -> None:
    def function(x: Tensor) -> Tensor:
        # relu gives equal elements, which share the gradient.
        least = x.relu().flatten().amin(0) if keepdim else x.amin()
        return x / x.abs().amax(dim=(), keepdim=keepdim) + least * x[0, 0].amax()

    torch.manual_seed(0)
    _compared(Layer(function), _batch(3), [_batch(7)])


def test_bounds_of_which_one_is_a_whole_number() -> None:
    def function(x: Tensor) -> Tensor:
        return x.clamp(-0.25, 1) + (4 * x).to(torch.int64).clip(-1, 1.5) + x.clamp(-1, 0.5).square()

    torch.manual_seed(0)
    _compared(Layer(function), _batch(3), [_batch(7)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_in_sums_of_16_bits_are_not_rounded_first(dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        narrow = x.to(dtype)
        return torch.add(x, narrow, alpha=0.1) + torch.sub(narrow, narrow.square(), alpha=0.3).to(x.dtype)

    torch.manual_seed(0)
    step = export_training_step(Layer(function), F.cross_entropy, _batch(3), dynamic_shapes=BATCH, fuse=False)
    numbers = [numpy_helper.to_array(one.attribute[0].t) for one in step.model.graph.node if one.op_type == "Constant"]
    numbers += [numpy_helper.to_array(one) for one in step.model.graph.initializer]
    factors = [one for one in numbers if one.size == 1 and one.dtype.kind == "f" and 0.05 < abs(one.item()) < 0.4]
    assert factors
    assert all(one in (np.float32(0.1), np.float32(0.3)) for one in factors), factors


def test_running_extremes() -> None:
    def function(x: Tensor) -> Tensor:
        # relu gives equal elements; of these the last one gets the gradient.
        values, places = x.relu().cummax(1)
        return values + x.cummin(0).values * places

    torch.manual_seed(0)
    _compared(Layer(function), _batch(3), [_batch(7)])


def test_lazy_modules_are_named_until_they_have_run() -> None:
    torch.manual_seed(0)
    module, batch = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, CLASSES)), _batch(3)
    with pytest.raises(ExportError, match=r"'0\.weight' of LazyLinear has no shape yet.* call the module once"):
        export_training_step(module, F.cross_entropy, batch)
    module(*batch[0])
    export_training_step(module, F.cross_entropy, batch)


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _rounded(x: Tensor) -> Tensor:
    return Rounded.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Recomputed(torch.autograd.Function):
    """Runs what it computes again in its backward pass, and gives twice the gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x.tanh()
        return 2.0 * torch.autograd.grad(y, x, gradients)[0]


def _recomputed(x: Tensor) -> Tensor:
    return Recomputed.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_a_backward_pass_of_ones_own_is_exported_or_named_with_advice_that_works() -> None:
    torch.manual_seed(0)
    _compared(Layer(_rounded), _batch(3), [_batch(7)])
    message = r"Recomputed has a backward pass of its own.* x \+ \(f\(x\) - x\)\.detach\(\)"
    with pytest.raises(ExportError, match=message):
        export_training_step(Layer(_recomputed), F.cross_entropy, _batch(3))
    _compared(Layer(lambda x: x + (_recomputed(x) - x).detach()), _batch(3), [_batch(7)])


class Shared(nn.Module):
    """Two parameters whose gradients are the same sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.layer(x) + self.one, self.layer(-x) + self.one + self.other])
        return both[: len(x)] + both[len(x) :]


def test_gradients_that_are_the_same_sums_keep_their_shapes() -> None:
    torch.manual_seed(0)
    _compared(Shared(), _batch(3), [_batch(7)])


def _scaled_unseen(x: Tensor) -> Tensor:
    hidden = x.sigmoid() + 1.0
    with torch.no_grad():
        hidden.mul_(0.5)
    return hidden.square()


def _masked_unseen(x: Tensor) -> Tensor:
    hidden = x * 2.0
    with torch.no_grad():
        hidden[:, 0] = 0.25
        hidden.masked_fill_(hidden > 0.5, torch.inf)
        hidden[hidden.isinf()] = 0.125
        scale = hidden.mean()
    return hidden.square() * scale


def _row_unseen(x: Tensor) -> Tensor:
    hidden = x * 2.0
    first = hidden[0]
    with torch.no_grad():
        first.add_(1.0)
    return hidden.square() + first.tanh()


def _chained_unseen(x: Tensor) -> Tensor:
    hidden = x * 2.0
    with torch.no_grad():
        hidden = hidden.clamp_(-0.5, 0.5).add_(0.25)
    hidden.mul_(3.0)
    with torch.no_grad():
        hidden /= hidden.abs().amax()
        other = x.tanh().mul_(2.0)
    return hidden.square() + other


@pytest.mark.parametrize("function", [_scaled_unseen, _masked_unseen, _row_unseen, _chained_unseen])
def test_what_is_written_without_gradients_keeps_those_it_had(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    _compared(Layer(function), _batch(3), [_batch(7)])
