"""Dropout of exported steps: the same masks in onnxruntime and in PyTorch, and as random as they should be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import ExportError, export_training_step
from gradfuse.custom_ops import draws
from gradfuse.export import dropout
from gradfuse.testing import assert_gradients_close

ITEMS = 200_000


def _mask_in_onnx(seed: int, layer: int, p: float, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    text = f"""
    <ir_version: 10, opset_import: ["": 20, "local": 1]>
    masks (int64 seed, float[{", ".join(map(str, shape))}] x) => (bool[{", ".join(map(str, shape))}] kept) {{
        kept = local.DropoutMask<layer={layer}, threshold={round(p * 2**31)}>(seed, x)
    }}
    <domain: "local", opset_import: ["": 20]>
    {draws.MASK}
    """
    session = onnxruntime.InferenceSession(onnx.parser.parse_model(text).SerializeToString())
    (kept,) = session.run(None, {"seed": np.array(seed), "x": np.zeros(shape, np.float32)})
    return np.asarray(kept)


@pytest.mark.parametrize("seed, layer, p", [(0, 0, 0.1), (1, 7, 0.5), (2**40 + 3, 1, 0.9), (-5, 0, 1.0), (3, 2, 0.0)])
def test_onnx_and_pytorch_have_one_mask(seed: int, layer: int, p: float) -> None:
    expected = dropout.mask(seed, layer, torch.empty(37, 53), p)
    np.testing.assert_array_equal(_mask_in_onnx(seed, layer, p, (37, 53)), expected.numpy())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_random(p: float) -> None:
    """Shares and correlations are within five standard deviations of what independent draws would give."""

    def mask(seed: int, layer: int) -> Tensor:
        return dropout.mask(seed, layer, torch.empty(ITEMS), p).double()

    masks = [mask(0, 0), mask(1, 0), mask(0, 1), mask(2**31 - 1, 0)]
    limit = 5 / ITEMS**0.5
    for one in masks:
        assert abs(one.mean() - (1 - p)) <= limit * (p * (1 - p)) ** 0.5
    centred = [(one - one.mean()) / one.std() for one in masks]
    centred += [one.roll(k) for one in centred[:1] for k in (1, 2, 64, 1000)]
    for i, one in enumerate(centred):
        for other in centred[:i]:
            assert abs((one * other).mean()) <= limit


class Dropping(nn.Module):
    """Dropout as a module, in place, by channels, of all, within attention and between recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        # 0.5, PyTorch's default.
        self.module = nn.Sequential(nn.Dropout(), nn.Dropout(0.2, inplace=True))
        self.all = nn.Dropout(1.0)
        self.channels = nn.Dropout1d(0.4)
        self.recurrent = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.3)
        self.outer = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.channels(self.module(self.inner(x).relu()))
        inner = inner + self.all(inner)
        # A draw that nothing reads has a number too.
        self.channels(inner)
        states, _ = self.recurrent(inner)
        mixed = F.scaled_dot_product_attention(states, inner, inner, dropout_p=0.2 if self.training else 0.0)
        return self.outer(mixed.mean(1))  # type: ignore[no-any-return]


@pytest.mark.long
def test_a_step_with_dropout_is_pytorchs_for_every_seed() -> None:
    torch.manual_seed(0)
    module = Dropping()
    batch = (torch.randn(4, 3, 6),), (torch.randint(0, 5, (4,)),)
    step = export_training_step(module, F.cross_entropy, batch)
    assert list(step.buffers) == ["dropout_seed"]
    losses = set()
    for seed in (0, 1):
        step.buffers["dropout_seed"][...] = seed
        results = run(step, batch, kernels=False)
        native, exact = (
            autograd(module, F.cross_entropy, batch, dtype, step) for dtype in (torch.float32, torch.float64)
        )
        terms = 4 * max(np.abs(array).max() for name, array in exact.items() if name.endswith(".grad"))
        assert results.pop("dropout_seed.updated") == seed + 1
        for name, result in results.items():
            assert_gradients_close(result, native[name], exact[name], np.float32, terms=terms)
        losses.add(float(results["loss"]))
    assert len(losses) == 2


class Attending(nn.Module):
    """Attention of short sequences, with dropout of its probabilities."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4 * heads, heads, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("sizes", [(3, 4, 16), pytest.param((8, 12, 128), marks=pytest.mark.long)])
def test_the_gradient_of_a_softmax_before_a_dropout_is_fused(sizes: tuple[int, int, int]) -> None:
    """The second has more probabilities than the test by numbers runs, and their places as a constant."""
    torch.manual_seed(0)
    items, heads, tokens = sizes
    x, y = torch.randn(2, items, tokens, 4 * heads)
    step = export_training_step(Attending(heads), nn.MSELoss(), (x, y), evaluation=False)
    assert step.report is not None
    assert "ScaledMaskedSoftmaxBackward" in [fusion.op for fusion in step.report.fusions]


class Scaled(nn.Module):
    """Dropout beside another counter, and a constant that forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        return self.dropout(self.norm(self.layer(x))) * factors  # type: ignore[no-any-return]


def test_a_buffer_that_nothing_reads_may_have_the_name_of_what_a_dropout_computes() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(), nn.Linear(3, 2))
    module.register_buffer("count", torch.ones(()))
    step = export_training_step(module, F.mse_loss, (torch.randn(2, 3), torch.randn(2, 2)))
    assert "count" in step.constants


def test_the_seed_is_found_beside_constants_of_the_forward_pass() -> None:
    torch.manual_seed(0)
    module = Scaled()
    batch = (torch.randn(16, 6),), (torch.randint(0, 8, (16,)),)
    step = export_training_step(module, F.cross_entropy, batch)
    losses = set()
    for seed, counted in [(0, 0), (0, 3), (5, 0)]:
        step.buffers["dropout_seed"][...] = seed
        step.buffers["norm.num_batches_tracked"][...] = counted
        results = run(step, batch, kernels=False)
        native, exact = (
            autograd(module, F.cross_entropy, batch, dtype, step) for dtype in (torch.float32, torch.float64)
        )
        assert results["norm.num_batches_tracked.updated"] == counted + 1
        assert_gradients_close(results["loss"], native["loss"], exact["loss"], np.float32)
        losses.add(float(results["loss"]))
    assert len(losses) == 2


class Drawing(nn.Module):
    """Every kind of draw that a seed determines."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        keep = (0.8 + torch.rand((len(x), 1), dtype=y.dtype)).floor_()
        y = y / 0.8 * keep + 0.1 * torch.rand_like(y) + torch.empty_like(y).uniform_(-0.5, 0.5)
        y = y + torch.randn(y.shape, dtype=y.dtype) * torch.randn_like(y) + torch.empty_like(y).normal_(1.0, 2.0)
        y = (
            y
            + F.gumbel_softmax(y, tau=0.7)
            + y * torch.bernoulli(y.detach().sigmoid()) * torch.bernoulli(y.detach(), 0.5)
        )
        y = y + torch.normal(y, 0.5) + torch.normal(0.1, y.square()) + torch.normal(y, y.square() + 0.1)
        y = y * torch.randint(1, 4, (len(x), 1)) + y[torch.randperm(len(x))]
        y = F.rrelu_(F.rrelu(y, 0.2, 0.6, self.training) - 0.5, training=False)
        return F.dropout(y, 0.3, self.training)


@pytest.mark.parametrize("training", [False, True])
def test_leaky_rectifiers_have_the_mean_slope_or_a_drawn_one(training: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.RReLU(0.2, 0.6).train(training))
    dynamic = ({0: "batch"},), ({0: "batch"},)
    batches = [((torch.randn(n, 6),), (torch.arange(n) % 5,)) for n in (4, 6)]
    step = export_training_step(module, F.cross_entropy, batches[0], dynamic_shapes=dynamic)
    assert ("dropout_seed" in step.buffers) is training
    results = run(step, batches[1], kernels=False)
    native, exact = (
        autograd(module, F.cross_entropy, batches[1], dtype, step) for dtype in (torch.float32, torch.float64)
    )
    for name, result in results.items():
        if name != "dropout_seed.updated":
            assert_gradients_close(result, native[name], exact[name], np.float32, terms=64)


def test_drawn_slopes_are_of_their_range() -> None:
    x = torch.linspace(-2.0, 2.0, ITEMS)
    with dropout.SeededDropout(torch.tensor(3)) as drawn:
        slopes = F.rrelu(x, 0.2, 0.6, training=True) / x
        changed = F.rrelu_(x.clone(), 0.2, 0.6, training=True) / x
    assert drawn.count == 2
    for one in (slopes, changed):
        assert torch.equal(one[x > 0], torch.ones_like(one[x > 0]))
        below = one[x <= 0]
        assert 0.2 - 1e-6 <= below.min() and below.max() <= 0.6 + 1e-6
        assert abs(below.mean() - 0.4) <= 5 * 0.4 * (12 * len(below)) ** -0.5


@pytest.mark.long
def test_a_step_draws_pytorchs_numbers_for_every_seed() -> None:
    torch.manual_seed(0)
    module = Drawing()
    dynamic = ({0: "batch"},), ({0: "batch"},)
    batches = [((torch.randn(n, 6),), (torch.arange(n) % 5,)) for n in (4, 6)]
    step = export_training_step(module, F.cross_entropy, batches[0], dynamic_shapes=dynamic)
    losses = set()
    for seed in (0, 7):
        step.buffers["dropout_seed"][...] = seed
        results = run(step, batches[1], kernels=False)
        native, exact = (
            autograd(module, F.cross_entropy, batches[1], dtype, step) for dtype in (torch.float32, torch.float64)
        )
        assert results.pop("dropout_seed.updated") == seed + 1
        terms = 16 * max(np.abs(array).max() for name, array in exact.items() if name.endswith(".grad"))
        for name, result in results.items():
            assert_gradients_close(result, native[name], exact[name], np.float32, terms=terms)
        losses.add(float(results["loss"]))
    assert len(losses) == 2


def test_uniform_numbers_are_uniform_and_normal_ones_normal() -> None:
    """Moments are within five standard deviations of what independent draws would give."""
    with dropout.SeededDropout(torch.tensor(3)) as drawn:
        uniform, normal = torch.rand(ITEMS, dtype=torch.float64), torch.randn(ITEMS, dtype=torch.float64)
        narrow = torch.rand(ITEMS, dtype=torch.bfloat16)
    assert drawn.count == 3
    limit = 5 / ITEMS**0.5
    assert abs(uniform.mean() - 0.5) <= limit * 12**-0.5
    assert abs(uniform.square().mean() - 1 / 3) <= limit * (1 / 5 - 1 / 9) ** 0.5
    assert abs(normal.mean()) <= limit
    assert abs(normal.square().mean() - 1.0) <= limit * 2**0.5
    assert abs((uniform - 0.5).mul(normal).mean()) <= limit * 12**-0.5
    assert 0.0 <= uniform.min() and uniform.max() < 1.0 and narrow.max() < 1.0


def test_draws_without_a_seed_are_refused() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y * torch.multinomial(y.detach().softmax(-1), 1)  # type: ignore[no-any-return]

    with pytest.raises(ExportError, match=r"by aten.multinomial.default, in .*Choice.forward \(test_dropout.py:"):
        export_training_step(Choice(), F.cross_entropy, (torch.randn(4, 6), torch.arange(4)))
