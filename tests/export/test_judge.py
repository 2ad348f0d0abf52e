"""The comparison that each exported step must pass: what rounding may do passes, an error of a hundredth does not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mutated_steps import is_wrong, mutants, refusal, right_outputs, truth_of
from random_steps import random_step
from torch import Tensor, nn
from training_models import MODELS, Residual

from gradfuse import ExportError, ModelError, export_training_step
from gradfuse.export import dropout


def caught(module: nn.Module, loss: Callable[..., Tensor], batch: Any) -> Counter[str]:
    """Export a step, put one error after the other in, and return how many there were of each kind; all are caught."""
    model = export_training_step(module, loss, batch, fuse=False).model
    truth = truth_of(module, loss, batch)
    assert refusal(truth, model) is None
    right = right_outputs(model, truth)
    found: Counter[str] = Counter()
    missed = []
    for mutant in mutants(model):
        try:
            if not is_wrong(mutant.model, right, truth):
                continue
        except ModelError:
            # It does not even run.
            pass
        found[mutant.kind] += 1
        if refusal(truth, mutant.model) is None:
            missed.append(f"{mutant.kind}: {mutant.place}")
    assert not missed
    return found


@pytest.mark.long
def test_an_error_of_a_hundredth_is_caught() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(16, 16),
        nn.Hardtanh(),
        nn.Linear(16, 5),
    )
    found = caught(module, F.cross_entropy, (torch.randn(16, 6), torch.randint(0, 5, (16,))))
    # The first bias has a gradient of 0, as normalisation takes it out: it has no hundredth.
    assert found["one percent"] == 7
    assert found["dropped term"] and found["swapped mask"] and found["wrong divisor"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_error_of_a_hundredth_is_caught_in_every_model(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]
    found = caught(model.module(), model.loss, model.batch(2, 6))
    assert found["one percent"] and found["dropped term"]


SEEDS = [pytest.param(seed, marks=[] if seed in (0, 3) else pytest.mark.slow) for seed in range(200)]


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_step_with_kinks_exports(seed: int) -> None:
    module, loss, batch, optimizer = random_step(seed)
    export_training_step(module, loss, batch, optimizer)


class Residuals(nn.Module):
    """A residual network for small images, after a stem with or without pooling, with dropout before the head."""

    def __init__(self, blocks: int, width: int, pooled: bool, dropped: float) -> None:
        super().__init__()
        stem: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.stem = nn.Sequential(*stem, *([nn.MaxPool2d(3, 2, 1)] if pooled else []))
        layers: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for block in range(blocks):
                layers.append(Residual(channels, width * 2**stage, 2 if stage and not block else 1))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropped)
        self.head = nn.Linear(channels, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.dropout(self.blocks(self.stem(image)).mean((2, 3))))  # type: ignore[no-any-return]


def _images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("blocks, pooled, dropped", [(3, False, 0.0), (2, True, 0.3)])
def test_a_residual_network_on_32_images_exports(blocks: int, pooled: bool, dropped: float, seed: int) -> None:
    """In each of these some of millions of activations lie within rounding of 0."""
    torch.manual_seed(seed)
    export_training_step(Residuals(blocks, 16, pooled, dropped), F.cross_entropy, _images(32))


@pytest.mark.slow
def test_a_hundredth_is_caught_where_activations_lie_within_rounding_of_a_kink() -> None:
    torch.manual_seed(0)
    module, batch = Residuals(1, 16, True, 0.3), _images(32)
    model = export_training_step(module, F.cross_entropy, batch, fuse=False).model
    truth = truth_of(module, F.cross_entropy, batch)
    wrong = [mutant for mutant in mutants(model) if mutant.kind == "one percent"]
    assert len(wrong) == len(list(module.parameters()))
    assert [mutant.place for mutant in wrong if refusal(truth, mutant.model) is None] == []


class Scaled(nn.Module):
    """Batch normalisation and dropout, times a constant that forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.layer(x))) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])  # type: ignore[no-any-return]


@pytest.mark.long
def test_a_mask_that_reads_another_counter_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if masks read the placeholder beside that of the seed: a counter that is 0, too, in a module never trained."""

    def connect(program: torch.export.ExportedProgram, seed: int) -> None:
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        for layer, node in enumerate(dropout.masks(program.graph)):
            node.args = (*node.args[:2], placeholders[seed], layer)

    monkeypatch.setattr(dropout, "connect", connect)
    with pytest.raises(ExportError, match="differs from PyTorch"):
        export_training_step(Scaled(), F.cross_entropy, (torch.randn(16, 6), torch.randint(0, 8, (16,))))


class Scheduled(nn.Module):
    """A counter that indexes a table, so that it can have few values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("factors", torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.get_buffer("factors")[self.get_buffer("steps")]
        self.get_buffer("steps").add_(1)
        return self.layer(x) * factor  # type: ignore[no-any-return]


def _function(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    class Applied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(function(self.first(x)))  # type: ignore[no-any-return]

    return Applied


EDGES: dict[str, Callable[[], nn.Module]] = {
    "no gradient but 0": _function(torch.sign),
    "largest of a row": _function(lambda h: h * F.one_hot(h.argmax(1), 32)),
    "rounding decides": _function(lambda h: (h * 3 / 3 - h).abs() + h),
    "not a number": _function(torch.log),
    "a counter that is an index": Scheduled,
}


@pytest.mark.parametrize("case", EDGES)
def test_steps_at_the_edge_of_what_can_be_compared_export(case: str) -> None:
    torch.manual_seed(1)
    export_training_step(EDGES[case](), F.cross_entropy, (torch.randn(16, 6), torch.randint(0, 5, (16,))), fuse=False)


@pytest.mark.long
def test_adam_on_a_gradient_that_is_0_but_for_rounding() -> None:
    """The first step of Adam moves a bias ahead of normalisation by its full rate, in the direction of a rounding."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(245, 5))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    export_training_step(module, F.cross_entropy, (torch.randn(7, 3, 9, 9), torch.randint(0, 5, (7,))), optimizer)


class Distances(nn.Module):
    """A bias by the bucket of a distance, as in T5: at 16, the logarithm of the bucket is a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(8, 1)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        distance = (places[:, None] - places).abs()
        far = 2 + (torch.log(distance.float().clamp(min=1) / 2) / math.log(64) * 2).to(torch.long)
        scores = self.bias(torch.where(distance < 2, distance, far)).squeeze(-1)
        return scores.softmax(-1) @ self.layer(x)  # type: ignore[no-any-return]


def test_what_follows_from_whole_numbers_is_decided_in_the_models_own_types() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 20, 4), torch.randn(2, 20, 4)
    # It is compared while it is exported; the logarithms of a fixed length would be constants.
    step = export_training_step(
        Distances(), F.mse_loss, batch, dynamic_shapes=(({1: "length"},), ({1: "length"},)), fuse=False
    )
    assert "Log" in {node.op_type for node in step.model.graph.node}


class Masking(nn.Module):
    """Adds the least number of its type twice, which is no number in float64 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x)
        mask = (torch.arange(4) > 1) * torch.finfo(torch.float32).min
        share = mask if scores.dtype == torch.float32 else mask.double() * torch.inf
        return (scores + share).softmax(-1)  # type: ignore[no-any-return]


def test_a_module_without_numbers_in_float64_is_compared_in_its_own_type() -> None:
    torch.manual_seed(0)
    export_training_step(Masking(), F.mse_loss, (torch.randn(3, 4), torch.randn(3, 4)), fuse=False)
