"""Buffers that no graph can hold: a step that does not read them exports; one that does is refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from like_torch import assert_like_torch
from torch import Tensor, nn

from gradfuse import ExportError, export_training_step


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def compressed() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


BUFFERS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "sparse": (lambda: torch.eye(3).bool().to_sparse(), False),
    "compressed": (compressed, False),
    "quantised": (lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.quint8), False),
    "nested": (nested, False),
    "of 8 bits": (lambda: torch.zeros(3).to(torch.float8_e4m3fn), False),
    "without values": (lambda: torch.empty(3, device="meta"), False),
    "complex": (lambda: torch.eye(3) * 1j, True),
    "bfloat16": (lambda: torch.ones(3, dtype=torch.bfloat16), True),
    "uint16": (lambda: torch.ones(3, dtype=torch.uint16), True),
}
"""How to make one, and whether a step has it among its constants."""


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.sampled(every=3)
def test_a_buffer_that_nothing_reads(name: str) -> None:
    torch.manual_seed(0)
    make, held = BUFFERS[name]
    module, batch = nn.Linear(3, 2), (torch.randn(4, 3), torch.randn(4, 2))
    module.register_buffer("spare", make(), persistent=False)
    step = export_training_step(module, nn.MSELoss(), batch, fuse=False)
    assert list(step.constants) == ["spare"] * held
    del module.spare
    assert_like_torch(step, module, nn.MSELoss(), batch)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("heads", nested())

    def forward(self, x: Tensor) -> Tensor:
        heads = self.get_buffer("heads")
        assert heads.is_nested and heads.dim() == 2
        return self.linear(x) @ heads.to_padded_tensor(0.0)[:1].t()  # type: ignore[no-any-return]


def test_a_nested_buffer_that_the_step_reads_is_refused() -> None:
    message = r"the step reads 'heads', which is .*jagged.*; expected a dense tensor"
    with pytest.raises(ExportError, match=message):
        export_training_step(Reading(), nn.MSELoss(), (torch.randn(4, 3), torch.randn(4, 3)))
