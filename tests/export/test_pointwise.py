"""Exported steps run chains of elementwise nodes in one pass, with PyTorch's numbers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import TrainingSession, TrainingStep, export_training_step
from gradfuse.testing import assert_gradients_close

WIDTH, ROWS = 64, 1024


class Gated(nn.Module):
    """A feed-forward layer of Llama with a root mean square norm before it, dropout behind, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.head = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head.weight.mean() * x + x
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        inner = F.silu(self.gate(normed)) * self.up(normed)
        x = x + self.dropout(self.down(inner))
        return self.head(self.dropout(x.relu()))  # type: ignore[no-any-return]


def batch(rows: int = ROWS) -> tuple[tuple[Tensor], tuple[Tensor]]:
    numbers = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, WIDTH, generator=numbers),), (torch.arange(rows) % 5,)


@pytest.fixture(scope="module")
def step() -> TrainingStep:
    torch.manual_seed(0)
    module = Gated()
    module_step = export_training_step(
        module, F.cross_entropy, batch(), dynamic_shapes=(({0: "rows"},), ({0: "rows"},))
    )
    return module_step


def expressions(step: TrainingStep) -> list[str]:
    nodes = [node for node in step.model.graph.node if node.op_type == "Pointwise"]
    return [onnx.helper.get_node_attr_value(node, "expression").decode() for node in nodes]


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_gates_sums_and_dropouts_are_chains(step: TrainingStep, is_dynamic: bool) -> None:
    if not is_dynamic:
        # The places of the elements of masks are constants there.
        torch.manual_seed(0)
        step = export_training_step(Gated(), F.cross_entropy, batch(), evaluation=False)
    assert step.report is not None
    found = expressions(step)
    assert sum("Sigmoid" in one for one in found) == 2  # the backward pass computes it again
    assert sum("Kept()" in one for one in found) == 4
    operators = {node.op_type for node in step.model.graph.node}
    assert "LayerNormBackward" in operators
    # No mask is stored, and no random bits outside of chains.
    assert not operators & {"BitShift", "BitwiseXor", "Sigmoid"}


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("rows", [ROWS, 7])
def test_numbers_are_pytorchs(step: TrainingStep, kernels: bool, rows: int) -> None:
    torch.manual_seed(0)
    module = Gated()
    for seed in (0, 5):
        step.buffers["dropout_seed"][...] = seed
        results = run(step, batch(rows), kernels=kernels)
        native, exact = (
            autograd(module, F.cross_entropy, batch(rows), dtype, step) for dtype in (torch.float32, torch.float64)
        )
        assert results.pop("dropout_seed.updated") == seed + 1
        for name, result in results.items():
            assert_gradients_close(result, native[name], exact[name], np.float32, terms=16)
    step.buffers["dropout_seed"][...] = 0


def test_small_steps_have_none() -> None:
    torch.manual_seed(0)
    small = export_training_step(Gated(), F.cross_entropy, batch(4))
    assert not expressions(small)


@pytest.mark.long
def test_training_goes_as_pytorchs() -> None:
    from gradfuse.export.dropout import SeededDropout

    torch.manual_seed(0)
    module = Gated()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    session = TrainingSession(export_training_step(module, F.cross_entropy, batch(), optimizer))
    ((x,), (labels,)) = batch()
    for seed in range(4):
        with SeededDropout(torch.tensor(seed)):
            loss = F.cross_entropy(module(x), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        # Updates of AdamW are as large for tiny gradients, of which rounding decides the sign.
        assert abs(session.step(x, labels) - float(loss)) <= 1e-4 * float(loss)
