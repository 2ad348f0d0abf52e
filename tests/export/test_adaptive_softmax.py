"""`nn.AdaptiveLogSoftmaxWithLoss`, whose own code branches on which clusters have rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradfuse import GradfuseError, TrainingSession, export_training_step

CLASSES = 50


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(16, CLASSES, [10, 20], div_value=2.0, head_bias=True)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.layer(x), labels).output  # type: ignore[no-any-return]


def loss(output: Tensor, weights: Tensor) -> Tensor:
    return -(output * weights).sum()


def test_updates_are_those_of_pytorch() -> None:
    torch.manual_seed(0)
    module = Model()
    # No label of the last cluster is in the first batch; the second one has one row.
    batches = [
        (torch.randn(rows, 8), torch.randint(0, most, (rows,)), torch.rand(rows))
        for rows, most in ((6, 20), (1, CLASSES), (30, CLASSES))
    ]
    x, labels, weights = batches[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    session = TrainingSession(
        export_training_step(
            module,
            loss,
            ((x, labels), weights),
            optimizer,
            dynamic_shapes=(({0: "rows"}, {0: "rows"}), ({0: "rows"},)),
        )
    )
    for x, labels, weights in batches:
        optimizer.zero_grad()
        native = loss(module(x, labels), weights)
        native.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert session.step((x, labels), weights) == pytest.approx(native.item(), abs=2e-5)
    for name, tensor in module.state_dict().items():
        np.testing.assert_allclose(session.state_dict()[name], tensor, rtol=0, atol=1e-6)
    for wrong in (-1, CLASSES):
        with pytest.raises(GradfuseError):
            session.step((x, torch.full_like(labels, wrong)), weights)
