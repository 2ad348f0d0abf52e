"""Embeddings with sparse gradients, which are dense in the step, and functions that TorchScript has compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from like_torch import trains_like_torch
from torch import Tensor, nn

from gradfuse import ExportError, export_training_step


class Lookups(nn.Module):
    """Each bag is looked up in an embedding and in an embedding bag, and the first of them by the same weight again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(7, 4, padding_idx=2, sparse=True)
        self.bags = nn.EmbeddingBag(7, 4, mode="mean", sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x).sum(1) + self.bags(x) * self.rows(x[:, 0])  # type: ignore[no-any-return]


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    # The first batch looks one row up several times.
    indices = [torch.tensor([[1, 1, 2], [1, 4, 6]]), torch.randint(0, 7, (4, 3)), torch.randint(0, 7, (2, 3))]
    return [(one, torch.randn(len(one), 4)) for one in indices]


@pytest.mark.parametrize("fuse", [True, False])
def test_sparse_gradients_are_dense_in_the_step(fuse: bool) -> None:
    shapes = (({0: "batch"},), ({0: "batch"},))
    trains_like_torch(Lookups, F.mse_loss, batches(), dynamic_shapes=shapes, fuse=fuse)


def test_sparse_adam_is_refused() -> None:
    module = Lookups()
    with pytest.raises(ExportError, match="SparseAdam does not support dense gradients, please consider Adam instead"):
        export_training_step(module, F.mse_loss, batches()[0], torch.optim.SparseAdam(list(module.parameters())))


def _mish(x: Tensor) -> Tensor:
    return x.mul(F.softplus(x).tanh())


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        with pytest.warns(DeprecationWarning, match="torch.jit.script"):
            self.mish = torch.jit.script(_mish)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.mish(self.first(x)))  # type: ignore[no-any-return]


def test_a_function_that_torchscript_has_compiled() -> None:
    torch.manual_seed(1)
    given = [(torch.randn(items, 4), torch.randn(items, 3)) for items in (3, 5, 3)]
    trains_like_torch(Activated, F.mse_loss, given, dynamic_shapes=(({0: "batch"},), ({0: "batch"},)))
