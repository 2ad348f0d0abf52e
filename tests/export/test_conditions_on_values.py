"""Conditions on values that choose what is computed: a step computes both sides, and takes the right one each time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import ArgumentError, ExportError, TrainingSession, export_training_step

WIDTH = 6
DYNAMIC = ({0: "batch"},), ({0: "batch"},)
Batch = tuple[tuple[Tensor], tuple[Tensor]]


def batch(rows: int, labels: Sequence[int]) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, WIDTH, generator=generator),), (torch.tensor(labels),)


def train_alike(module: nn.Module, loss: Callable[..., Tensor], batches: Sequence[Batch]) -> None:
    """Export with the first batch, and train on all others as PyTorch does, in float64."""
    native = copy.deepcopy(module).double()
    step = export_training_step(
        module,
        loss,
        batches[0],
        torch.optim.SGD(module.parameters(), lr=0.3),
        dynamic_shapes=DYNAMIC,
        evaluation=False,
        verify="quick",
    )
    session = TrainingSession(step)
    optimizer = torch.optim.SGD(native.parameters(), lr=0.3)
    for (x,), (y,) in batches[1:]:
        value = loss(native(x.double()), y)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        for parameter in native.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert abs(session.step(x.numpy(), y.numpy()) - value.item()) <= 1e-5
    for name, tensor in native.state_dict().items():
        np.testing.assert_allclose(session.state_dict()[name], tensor, rtol=0, atol=1e-5)


def of_detection(scores: Tensor, y: Tensor) -> Tensor:
    """A sum of losses, each of which asks in another way whether it has any rows; the means of none are NaN."""
    found, ones, rows = y > 0, y == 1, torch.where(y == 2)[0]
    count, twos = ones.sum(), len(rows)
    if not found.any():
        first = scores.sum() * 0
    else:
        first = F.cross_entropy(scores[found], y[found])
    second = (scores[:, 1].square() * ones).sum() / count if count > 0 else scores.new_zeros(())
    if twos > 0:
        first = first + scores[rows].abs().max(-1)[0].mean()
    return of_missing(scores, y) + first + second


def of_missing(scores: Tensor, y: Tensor) -> Tensor:
    missing = scores[y == 0]
    if missing.shape[0] == 0:
        return torch.tensor(0.0, dtype=scores.dtype, requires_grad=True)
    return missing.square().mean()


def test_losses_of_what_a_batch_lacks_are_what_the_code_says() -> None:
    torch.manual_seed(0)
    batches = [batch(6, [0, 1, 2, 3, 1, 0]), batch(3, [0, 0, 0]), batch(4, [2, 2, 3, 2]), batch(5, [1, 0, 1, 1, 3])]
    train_alike(nn.Linear(WIDTH, 4), of_detection, batches)


def by_class(scores: Tensor, y: Tensor) -> Tensor:
    """Only where a class occurs it has a loss, whose parameters would get NaN otherwise."""
    total = scores.sum() * 0
    for label in range(3):
        mask = y == label
        if mask.sum() == 0:
            continue
        total = total + F.cross_entropy(scores[mask], y[mask])
    if total > 1.5:
        total = total * 0.5
    return total + in_place(scores, y == 1)


def in_place(scores: Tensor, mask: Tensor) -> Tensor:
    """Divides by 0 in a tensor that it writes into, unless the batch has some."""
    changed = scores * 1.0
    if mask.any():
        changed[:, 1] = changed[:, 1] / mask.sum()
    return changed.square().mean()


def test_classes_that_a_batch_lacks_are_left_out() -> None:
    torch.manual_seed(0)
    batches = [batch(6, [0, 1, 2, 2, 1, 0]), batch(2, [2, 2]), batch(7, [0, 1, 0, 1, 0, 1, 1]), batch(1, [1])]
    train_alike(nn.Linear(WIDTH, 3), by_class, batches)


class Experts(nn.Module):
    """As in DeepSeek: experts ask a list of counts whether they get rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return self.in_parts(x, *self.router(x).softmax(-1).max(-1)) + self.by_counts(x, weights, chosen)

    def by_counts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        counts = torch.bincount(chosen.flatten(), minlength=4)
        for expert, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            rows, place = torch.where(chosen == expert)
            total[rows] += self.experts[expert](x[rows]) * weights[rows, place, None]
        return total

    def in_parts(self, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        parts = torch.split(x[order], torch.bincount(chosen, minlength=4).tolist())
        results = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.empty_like(results).index_copy(0, order, results) * weight[:, None]


def test_experts_that_ask_counts_train_as_soon_as_they_get_rows() -> None:
    torch.manual_seed(0)
    batches = [batch(rows, [row % 3 for row in range(rows)]) for rows in (2, 1, 40, 3)]
    train_alike(Experts(), F.cross_entropy, batches)


def of_pairs(scores: Tensor, y: Tensor) -> Tensor:
    """Conditions joined by `and`, `or` and `not`, on truth values, sizes and numbers, around what fails for nothing."""
    ones, twos, rest = scores[y == 1], scores[y == 2], y > 2
    total = F.cross_entropy(scores, y)
    if len(ones) > 1 and len(twos) > 0:
        total = total + torch.cdist(ones, twos).min(1)[0].mean() + F.pdist(ones).mean()
    if not (y == 1).any() or rest.any():
        total = total + scores.square().mean()
    count = int(rest.sum())
    if count == 0:
        return total
    weight = 0.5 if (scores.argmax(1) == y).double().mean().item() > 0.3 else 2.0
    return total + weight * scores[rest].max() / max((y == 1).sum().item(), count - 0.5)


def of_either(scores: Tensor, y: Tensor) -> Tensor:
    """Asks a second mask only if the first one is empty, which it is not in the first batch."""
    ones, twos = y == 1, y == 2
    total = F.cross_entropy(scores, y)
    if ones.any() or twos.any():
        total = total + scores[ones | twos].square().mean()
    return total


def test_a_condition_that_another_one_hides_is_asked() -> None:
    torch.manual_seed(0)
    batches = [batch(6, [0, 1, 2, 3, 1, 2]), batch(3, [0, 0, 3]), batch(4, [2, 0, 0, 2]), batch(5, [1, 0, 3, 1, 3])]
    train_alike(nn.Linear(WIDTH, 4), of_either, batches)


def test_conditions_on_several_values_and_numbers_hold_for_each_batch() -> None:
    torch.manual_seed(0)
    batches = [batch(6, [0, 1, 2, 3, 1, 2]), batch(3, [0, 0, 0]), batch(4, [2, 1, 1, 2]), batch(5, [1, 0, 3, 1, 3])]
    train_alike(nn.Linear(WIDTH, 4), of_pairs, [*batches, batch(2, [3, 2])])


def of_counts(scores: Tensor, y: Tensor) -> Tensor:
    """Chains of conditions on one number, of which the first batch takes one side alone."""
    mask = y == 1
    n = int(mask.sum())
    total = F.cross_entropy(scores, y)
    if n >= 4:
        total = total + scores[mask].square().mean()
    elif n == 2:
        total = total * 0.5
    elif n == 1:
        total = total + scores[mask].mean()
    else:
        total = total - scores.mean()
    zeros = int((y == 0).sum().item())
    weight = 1.0 if zeros > 4 else (0.5 if zeros > 1 else (0.1 if zeros else 7.0))
    return total * weight * (2.0 if 1 <= n < 3 else 1.0) * (3.0 if n in (0, 4) else 1.0)


def test_chains_of_conditions_on_a_number_hold_for_each_batch() -> None:
    torch.manual_seed(0)
    batches = [batch(6, [0, 1, 2, 3, 1, 0]), batch(3, [0, 2, 3]), batch(5, [1, 1, 1, 1, 0]), batch(4, [2, 3, 3, 1])]
    train_alike(nn.Linear(WIDTH, 4), of_counts, [*batches, batch(6, [0] * 6)])


def of_frequencies(scores: Tensor, y: Tensor) -> Tensor:
    """Weights by how many rows a class has, and by the losses of these."""
    losses = F.cross_entropy(scores, y, reduction="none")
    counts = torch.bincount(y[y != 3], minlength=4)
    means = torch.bincount(y, weights=losses.detach(), minlength=4) / y.bincount(minlength=4).clamp(min=1)
    weights = (1.0 / (counts + 1)).to(scores.dtype)
    return F.cross_entropy(scores, y, weight=weights) + (means[y] * losses).mean()


def test_counts_of_classes_have_the_length_that_code_asks_for() -> None:
    torch.manual_seed(0)
    batches = [batch(6, [0, 1, 2, 3, 1, 0]), batch(3, [0, 0, 0]), batch(2, [3, 3]), batch(5, [1, 2, 1, 2, 0])]
    train_alike(nn.Linear(WIDTH, 4), of_frequencies, batches)


def of_more_counts(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores, y) * torch.bincount(y, minlength=3).to(scores.dtype).std()


@pytest.mark.parametrize("label", [3, -1])
def test_a_class_beyond_the_counts_that_code_asks_for_stops_a_step(label: int) -> None:
    step = export_training_step(nn.Linear(WIDTH, 4), of_more_counts, batch(4, [0, 1, 2, 1]), evaluation=False)
    (x,), (y,) = batch(4, [0, 1, label, 1])
    with pytest.raises(ArgumentError, match=rf"\[2\] is {label}; expected 0 to"):
        TrainingSession(step).step(x.numpy(), y.numpy())


def test_more_counts_than_code_asks_for_export_if_the_batch_has_them() -> None:
    torch.manual_seed(0)
    batches = [batch(4, [0, 3, 1, 1]), batch(3, [2, 0, 2]), batch(2, [3, 3])]
    train_alike(nn.Linear(WIDTH, 4), of_more_counts, batches)


def of_classes(scores: Tensor, y: Tensor) -> Tensor:
    """Lists, dictionaries and counts that grow by the classes that a batch has, also in functions of its own."""

    def of_class(label: int) -> Tensor:
        mask = y == label
        if not mask.any():
            return scores.sum() * 0
        return scores[mask].square().mean()

    losses, found, parts = [], 0, {}
    for label in range(4):
        mask = y == label
        if mask.sum() == 0:
            continue
        losses.append(F.cross_entropy(scores[mask], y[mask]))
        found += 1
    kept = [scores[y == label].mean(0) for label in range(1, 4) if (y == label).any()]
    if (y == 3).any():
        parts["third"] = scores[y == 3].abs().mean()
    third = parts.get("third")
    if not kept:
        return torch.stack(losses).max() if third is None else third
    first = sum(losses) / len(losses) + torch.stack(kept).square().mean() / found
    return first + sum(parts.values()) + sum(of_class(label) for label in range(4))


def test_lists_that_grow_by_what_a_batch_has_are_joined_and_counted() -> None:
    torch.manual_seed(0)
    batches = [batch(6, [0, 1, 2, 3, 1, 0]), batch(3, [0, 0, 0]), batch(4, [2, 2, 3, 2]), batch(5, [1, 0, 1, 1, 0])]
    train_alike(nn.Linear(WIDTH, 4), of_classes, batches)


def of_elements(scores: Tensor, y: Tensor) -> Tensor:
    """Goes through lists whose elements depend on the batch, numbers them, and takes some out."""
    losses, means, labels = [], [], []
    for label in range(4):
        mask = y == label
        if not mask.any():
            continue
        losses.append(F.cross_entropy(scores[mask], y[mask]))
        means.append(scores[mask].mean(0))
        labels.append(label)
    total = max(losses) + losses[0] * losses[-1] + F.cross_entropy(torch.stack(means), torch.tensor(labels))
    for place, (mean, label) in enumerate(zip(means, labels, strict=True)):
        total = total + mean[label].square() * (place + 1)
    last = [scores.square().mean()]
    if (y == 2).any():
        last.append(scores[y == 2].mean())
    total = total + last[-1] + last[0]
    weights = [loss.detach().exp() for loss in losses]
    return 0.1 * (total + weighted(losses, weights) / len(losses))


def weighted(losses: list[Tensor], weights: list[Tensor]) -> Tensor:
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    return total / torch.stack(weights).sum()


def test_elements_of_lists_that_grow_by_what_a_batch_has_are_those_that_are_there() -> None:
    torch.manual_seed(0)
    batches = [batch(6, [0, 1, 2, 3, 1, 0]), batch(3, [1, 1, 1]), batch(4, [2, 1, 3, 2]), batch(5, [1, 0, 1, 1, 0])]
    train_alike(nn.Linear(WIDTH, 4), of_elements, batches)


def of_missing_parts(scores: Tensor, y: Tensor) -> Tensor:
    """Parts that are None where a batch lacks something, in variables, tuples, lists and arguments."""

    def part(label: int) -> Tensor | None:
        mask = y == label
        if mask.sum() == 0:
            return None
        return scores[mask].square().mean()

    def moments() -> tuple[Tensor | None, Tensor | None]:
        if not (y == 1).any():
            return None, None
        return scores[y == 1].mean(), scores[y == 1].square().mean()

    best = None
    for label in range(3):
        value = part(label)
        if value is not None and (best is None or value < best):
            best = value
    mean, square = moments()
    total = F.cross_entropy(scores, y) if best is None else F.cross_entropy(scores, y) + best
    if mean is not None:
        total = total + mean * square  # type: ignore[operator]
    if part(2) is not None:
        total = total * 2
    parts = [value for value in map(part, range(4)) if value is not None]
    weights = (y == 3).to(scores.dtype) if (y == 3).any() else None
    return total + sum(parts) / len(parts) + pooled(scores, weights)


def pooled(scores: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return scores.mean()
    return (scores * weights[:, None]).sum() / weights.sum()


def test_what_is_none_where_a_batch_lacks_something_may_be_asked_for() -> None:
    torch.manual_seed(0)
    batches = [batch(6, [0, 1, 2, 3, 1, 0]), batch(3, [3, 3, 3]), batch(4, [2, 1, 3, 2]), batch(5, [1, 0, 1, 1, 0])]
    train_alike(nn.Linear(WIDTH, 4), of_missing_parts, batches)


def of_other_lists(scores: Tensor, y: Tensor) -> Tensor:
    """Takes the elements of two lists together that are there under other conditions."""
    first, second = [], []
    for label in range(3):
        mask = y == label
        if mask.any():
            first.append(scores[mask].mean())
        if mask.sum() > 1:
            second.append(scores[mask].std())
    return torch.stack([a * b for a, b in zip(first, second, strict=False)]).sum()


def test_lists_with_other_elements_are_not_taken_together() -> None:
    torch.manual_seed(0)
    with pytest.raises(ExportError, match=r"in of_other_lists \(test_conditions_on_values.py:\d+\)"):
        export_training_step(nn.Linear(WIDTH, 3), of_other_lists, batch(4, [0, 1, 2, 0]))


def of_hardest(scores: Tensor, y: Tensor) -> Tensor:
    """Online hard example mining: those above a threshold, but not fewer than the hardest few."""
    losses = F.cross_entropy(scores, y, reduction="none")
    hard, least = losses[losses > 1.4], y[y != 9].numel() // 2
    if hard.numel() < least:
        hard, _ = losses.topk(least)
    return hard.mean()


def test_sides_may_select_other_numbers_of_elements() -> None:
    torch.manual_seed(0)
    batches = [batch(6, [0, 1, 2, 3, 1, 0]), batch(3, [0, 0, 0]), batch(4, [2, 2, 3, 2]), batch(9, [1, 0, 3] * 3)]
    train_alike(nn.Linear(WIDTH, 4), of_hardest, batches)


class Streaks(nn.Module):
    """Counts batches since one with a positive mean, from 0 on, where setting that to 0 changes nothing."""

    streak: Tensor
    total: Tensor
    first: Tensor
    second: Tensor
    third: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)
        self.register_buffer("streak", torch.zeros(()))
        for name in ("total", "first", "second", "third"):
            self.register_buffer(name, torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if x[:, 0].mean() > 0:
            self.streak.zero_()
            self.total.data.zero_()
            torch._foreach_zero_([self.first])
            self.second.data = torch.zeros_like(self.second)
            self.third[:].data.zero_()
        self.streak += 1
        for counted in (self.total, self.first, self.second, self.third):
            counted += self.streak
        y: Tensor = self.layer(x)
        return y * self.streak * self.total + self.first * self.second - self.third


def test_a_side_may_set_a_buffer_to_what_it_is() -> None:
    torch.manual_seed(0)
    batches = [batch(rows, [0, 1, 2, 3, 1, 0, 2, 3][:rows]) for rows in (6, 3, 4, 5, 7, 8)]
    signs = [bool(x[:, 0].mean() > 0) for (x,), _ in batches]
    assert len({*signs[1:]}) == 2
    for first in (signs.index(True), signs.index(False)):
        train_alike(Streaks(), F.cross_entropy, [batches[first], *batches])


def of_two_names(scores: Tensor, y: Tensor) -> Tensor:
    """Writes into a tensor that is another one if both conditions hold: not here, nor with one turned round."""
    first, second = scores * 1, scores * 2
    if scores.mean() > 5:
        second = first
    if scores.std() > 5:
        second += 1
    return (first.square() + second).mean()


def test_what_two_conditions_change_together_is_refused_if_it_cannot_be_selected() -> None:
    torch.manual_seed(0)
    with pytest.raises(ExportError, match=r"in of_two_names \(test_conditions_on_values.py:\d+\)"):
        export_training_step(nn.Linear(WIDTH, 4), of_two_names, batch(6, [0, 1, 2, 3, 1, 0]), dynamic_shapes=DYNAMIC)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        parts = [y]
        for column in range(3):
            if (y[:, column] > 0).any():
                parts.insert(0, y * 2)
        return torch.stack(parts).sum(0)


def test_lists_that_grow_at_the_front_by_values_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ExportError, match=r"value of a tensor.*forward \(test_conditions_on_values.py:\d+\)"):
        export_training_step(Counting(), F.cross_entropy, batch(4, [0, 1, 2, 0]), dynamic_shapes=DYNAMIC)
