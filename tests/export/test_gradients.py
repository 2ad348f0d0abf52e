"""Gradients that ONNX's operators do not show: where they end, rows of embeddings without one, rows masked throughout.

Each export compares itself with PyTorch, so that what is wrong raises; a second batch is compared here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_models import autograd, run

from gradfuse import TrainingStep, export_training_step
from gradfuse.testing import assert_gradients_close

DYNAMIC = ({0: "batch"},), ({0: "batch"},)


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def without_gradient(y: Tensor) -> Tensor:
    with torch.no_grad():
        scale, shift = y.abs().max(), y.mean(0)
    return y / scale - shift * y


def partly_without(y: Tensor) -> Tensor:
    with torch.no_grad():
        z = y.exp()
        with torch.enable_grad():
            w = y * z
    return y * w


def require_torchs(step: TrainingStep, module: nn.Module, batch: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]) -> None:
    native, exact = (autograd(module, F.mse_loss, batch, dtype, step) for dtype in (torch.float32, torch.float64))
    results = run(step, batch, kernels=True)
    for name in step.parameters:
        key = f"{name}.grad"
        assert_gradients_close(results[key], native[key], exact[key], native[key].dtype, terms=16.0)


@pytest.mark.parametrize(
    "function",
    (
        lambda y: y * y.detach(),
        lambda y: y + (y.round() - y).detach(),
        lambda y: (y.detach() * y).detach() + y.relu(),
        lambda y: checkpoint(lambda z: (z * z).sin(), y, use_reentrant=False),
        without_gradient,
        partly_without,
    ),
    ids=("detach", "straight through", "nested", "checkpoint", "no_grad", "enable_grad"),
)
@pytest.mark.parametrize("fuse", (True, False))
@pytest.mark.sampled(every=2)
def test_gradients_end_where_the_module_says(function: Callable[[Tensor], Tensor], fuse: bool) -> None:
    torch.manual_seed(0)
    module = Layer(function)
    batches = [((torch.randn(n, 4),), (torch.randn(n, 4),)) for n in (3, 5)]
    step = export_training_step(module, F.mse_loss, batches[0], dynamic_shapes=DYNAMIC, fuse=fuse)
    assert {node.op_type for node in step.model.graph.node}.isdisjoint({"StopGradient"})
    require_torchs(step, module, batches[1])


class Positions(nn.Module):
    """Adds positions that are no buffer, as video models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.positions = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.positions.type_as(x).detach().clone())  # type: ignore[no-any-return]


def test_constants_that_are_detached() -> None:
    torch.manual_seed(0)
    batches = [((torch.randn(n, 4),), (torch.randn(n, 4),)) for n in (3, 5)]
    module = Positions()
    step = export_training_step(module, F.mse_loss, batches[0], dynamic_shapes=DYNAMIC)
    require_torchs(step, module, batches[1])


class Words(nn.Module):
    def __init__(self, padding: int | None, by_frequency: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=padding, scale_grad_by_freq=by_frequency)
        self.more = nn.Embedding(7, 4)
        self.more.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).sum(1) * self.more(ids[:, 0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("by_frequency", (False, True))
@pytest.mark.parametrize("padding", (None, 2))
@pytest.mark.sampled(every=5)
def test_rows_of_embeddings(padding: int | None, by_frequency: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Words(padding, by_frequency).to(dtype)
    ids = torch.tensor([[2, 2, 5], [5, 2, 1], [6, 6, 6]])
    step = export_training_step(module, F.mse_loss, (ids, torch.randn(3, 4).to(dtype)))
    fused = [node.op_type for node in step.model.graph.node if node.domain == "aclnn"]
    assert ("EmbeddingDenseBackward" in fused) == (dtype != torch.float64)


class Attention(nn.Module):
    """A row that is masked throughout gives zeros, and so it does in gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.layer(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])[:, 0]


@pytest.mark.parametrize("fuse", (True, False))
def test_rows_that_are_masked_throughout(fuse: bool) -> None:
    torch.manual_seed(0)
    seen = torch.rand(2, 3, 3) > 0.3
    seen[0, 1] = False
    batch = (torch.randn(2, 3, 4), seen), torch.randn(2, 3, 4)
    export_training_step(Attention(), F.mse_loss, batch, fuse=fuse)


def test_a_step_in_float64() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    for reduction in ("mean", "sum"):
        loss = nn.MSELoss(reduction=reduction)
        step = export_training_step(module, loss, (torch.randn(11, 5).double(), torch.randn(11, 3).double()))
        assert step.parameters["0.weight"].dtype == "float64"
