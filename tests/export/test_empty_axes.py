"""Axes of size 0, as of an image without boxes: what a step gives is what PyTorch gives, or an error.

torch.export takes every size to be at least 2, and onnxruntime's mean of nothing is 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import ArgumentError, ModelError, TrainingSession, TrainingStep, export_training_step


class OfBoxes(nn.Module):
    """A number for each image, and one that depends on a list of boxes for each."""

    def __init__(self, function: Callable[[OfBoxes, Tensor], Any]) -> None:
        super().__init__()
        self.image, self.layer, self.norm = nn.Linear(3, 1), nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.classes = nn.Embedding(7, 5)
        self.function = function

    def forward(self, image: Tensor, boxes: Tensor) -> Tensor:
        return self.image(image).sum() + self.function(self, boxes)  # type: ignore[no-any-return]


def _summed(module: OfBoxes, boxes: Tensor) -> Any:
    return module.layer(boxes).square().sum()


def _per_place(module: OfBoxes, boxes: Tensor) -> Any:
    return (module.layer(boxes).softmax(-1).log() * boxes[..., :1]).sum()


def _embedded(module: OfBoxes, boxes: Tensor) -> Any:
    return module.classes((boxes[..., 0] > 0).long()).sum()


def _classified(module: OfBoxes, boxes: Tensor) -> Any:
    classes = (boxes[..., 0] > 0).long().flatten()
    return F.cross_entropy(module.layer(boxes).flatten(0, 1), classes, reduction="sum")


def _padded(module: OfBoxes, boxes: Tensor) -> Any:
    empty = module.layer.bias.expand(boxes.shape[0], 1, 5)
    return torch.cat([module.layer(boxes), empty], 1).tanh().sum()


def _multiplied(module: OfBoxes, boxes: Tensor) -> Any:
    return module.layer(boxes).prod(1).sum() + module.layer.weight.square().sum()


def _divided(module: OfBoxes, boxes: Tensor) -> Any:
    return module.layer(boxes).sum() / max(boxes.shape[1], 1)


def _mean(module: OfBoxes, boxes: Tensor) -> Any:
    return module.layer(boxes).mean(1).nan_to_num(3.0).sum()


def _largest(module: OfBoxes, boxes: Tensor) -> Any:
    return module.layer(boxes).amax(1).clamp(min=-1.0).sum()


def _if_any(module: OfBoxes, boxes: Tensor) -> Any:
    return torch.where((boxes > 0).any(), module.layer.weight.sum(), module.layer.bias.sum())


def _if_all(module: OfBoxes, boxes: Tensor) -> Any:
    return torch.where((boxes[..., 0] > 0).all(1), module.layer.weight.sum(), module.layer.bias.sum()).sum()


def _asked_by_len(module: OfBoxes, boxes: Tensor) -> Any:
    if len(boxes.transpose(0, 1)) == 0:
        return module.layer.weight.sum()
    return module.layer(boxes).sum()


def _asked_by_numel(module: OfBoxes, boxes: Tensor) -> Any:
    return module.layer(boxes).sum() if boxes.numel() else module.layer.weight.sum()


def _normalised(module: OfBoxes, boxes: Tensor) -> Any:
    return module.norm(module.layer(boxes).flatten(0, 1)).square().sum()


def _products(module: OfBoxes, boxes: Tensor) -> Any:
    return (module.layer(boxes).transpose(1, 2) @ boxes).exp().sum()


def _products_with_one(module: OfBoxes, boxes: Tensor) -> Any:
    return (module.layer(boxes).transpose(1, 2) @ boxes[0]).exp().sum()


def _attention(module: OfBoxes, boxes: Tensor) -> Any:
    heads = module.layer(boxes).reshape(boxes.shape[0], -1, 1, 5).transpose(1, 2)
    return (heads @ heads.transpose(-1, -2)).softmax(-1).sum() + (boxes.transpose(0, 1) @ boxes.permute(1, 2, 0)).sum()


def _exported(function: Callable[[OfBoxes, Tensor], Any], *, fuse: bool) -> tuple[OfBoxes, TrainingStep]:
    torch.manual_seed(0)
    module = OfBoxes(function)
    batch = (torch.randn(2, 3), torch.randn(3, 4, 4)), ()
    with warnings.catch_warnings():
        # Sizes of 1 may be refused as well.
        warnings.filterwarnings("ignore", "export_training_step: axis")
        return module, export_training_step(
            module,
            None,
            batch,
            torch.optim.SGD(module.parameters(), lr=0.1),
            dynamic_shapes=((None, {0: "rows", 1: "boxes"}), ()),
            fuse=fuse,
        )


EXPECTED = r"axis [01] of 'boxes' out of range, expected at least 1|at least one element along axis [01], as onnx"


def assert_near(value: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    """Assert that nothing but rounding differs."""
    largest = np.abs(wanted).max() if wanted.size else 0.0
    assert np.abs(value - wanted).max(initial=0.0) <= 64 * np.finfo(np.float32).eps * max(1.0, largest)


@pytest.mark.parametrize(
    "function, right",
    [
        (_summed, {(0, 4), (3, 0), (0, 0)}),
        (_per_place, {(0, 4), (3, 0), (0, 0)}),
        (_embedded, {(0, 4), (3, 0), (0, 0)}),
        (_classified, {(0, 4), (3, 0), (0, 0)}),
        (_padded, {(0, 4), (3, 0), (0, 0)}),
        (_multiplied, {(0, 4), (3, 0), (0, 0)}),
        (_divided, {(0, 4)}),
        (_mean, {(0, 4)}),
        (_largest, {(0, 4)}),
        (_if_any, set()),
        (_if_all, {(0, 4)}),
        (_asked_by_len, {(0, 4)}),
        (_asked_by_numel, set()),
        (_normalised, set()),
        (_products, set()),
        (_products_with_one, set()),
        (_attention, set()),
    ],
)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.sampled(every=3)
def test_no_boxes_give_what_torch_gives_or_an_error(
    function: Callable[[OfBoxes, Tensor], Any], right: set[tuple[int, int]], fuse: bool
) -> None:
    module, step = _exported(function, fuse=fuse)
    session = TrainingSession(step)
    image = torch.randn(2, 3)
    for sizes in ((0, 4), (3, 0), (0, 0), (5, 7)):
        boxes, before = torch.randn(*sizes, 4), session.state_dict()
        if sizes in right or 0 not in sizes:
            module.load_state_dict({name: torch.from_numpy(value) for name, value in before.items()}, strict=False)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            optimizer.zero_grad()
            loss = module(image, boxes)
            loss.backward()
            optimizer.step()
            updated = {name: value.numpy() for name, value in module.state_dict().items()}
            assert_near(np.array(session.step((image, boxes))), np.array(loss.item()))
            for name, value in session.state_dict().items():
                assert_near(value, updated[name])
        else:
            with pytest.raises((ModelError, ArgumentError), match=EXPECTED):
                session.step((image, boxes))
            for name, value in session.state_dict().items():
                np.testing.assert_array_equal(value, before[name])


def test_where_onnxruntime_leaves_products_of_nothing_unset_no_axis_of_one_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it did before version 1.20."""
    _, step = _exported(_multiplied, fuse=True)
    monkeypatch.setattr(onnxruntime, "__version__", "1.19.2")
    session = TrainingSession(step)
    with pytest.raises(ArgumentError, match="expected at least one element along axis 1, as onnxruntime's kernels"):
        session.step((torch.randn(2, 3), torch.randn(3, 0, 4)))
    assert np.isfinite(session.step((torch.randn(2, 3), torch.randn(3, 4, 4))))


def _normalised_where_it_is_asked(module: OfBoxes, boxes: Tensor) -> Any:
    h = module.layer(boxes).flatten(0, 1)
    return module.norm(h).square().sum() * (2.0 if len(h) == 1 else 1.0)


def _normalised_in_groups(module: OfBoxes, boxes: Tensor) -> Any:
    return F.group_norm(module.layer(boxes).flatten(0, 1), 5, module.norm.weight).square().sum()


def _normalised_by_instance(module: OfBoxes, boxes: Tensor) -> Any:
    return F.instance_norm(module.layer(boxes).flatten(0, 1).T[None], weight=module.norm.weight).square().sum()


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    "function, named",
    [
        (_normalised, "batch normalisation"),
        (_normalised_where_it_is_asked, "batch normalisation"),
        (_normalised_in_groups, "group normalisation"),
        (_normalised_by_instance, "instance normalisation"),
    ],
)
@pytest.mark.sampled(every=2)
def test_normalisation_of_one_value_is_refused_where_a_product_of_sizes_is_1(
    function: Callable[[OfBoxes, Tensor], Any], named: str, fuse: bool
) -> None:
    module, step = _exported(function, fuse=fuse)
    session, image = TrainingSession(step), torch.randn(2, 3)
    for rows, boxes in ((1, 1), (1, 2), (2, 1)):
        module.load_state_dict({n: torch.from_numpy(v) for n, v in session.state_dict().items()}, strict=False)
        given = torch.randn(rows, boxes, 4)
        if rows * boxes == 1:
            with pytest.raises(ValueError, match="Expected more than 1"):
                module(image, given)
            with pytest.raises(ModelError, match=f"{named} of one value per channel, expected more"):
                session.step((image, given))
        else:
            assert_near(np.array(session.step((image, given))), np.array(module(image, given).item()))


def test_no_images_are_evaluated_as_by_torch() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    module, shapes = nn.Sequential(*layers), (({0: "images"},), ({0: "images"},))
    batch = (torch.randn(4, 1, 6, 6),), (torch.tensor([0, 1, 2, 0]),)
    for fuse in (True, False):
        step = export_training_step(
            module, nn.CrossEntropyLoss(), batch, torch.optim.SGD(module.parameters()), dynamic_shapes=shapes, fuse=fuse
        )
        assert TrainingSession(step).evaluate(torch.randn(0, 1, 6, 6)).shape == (0, 3)


def test_evaluation_of_no_boxes_gives_what_torch_gives_or_an_error() -> None:
    image = torch.randn(2, 3)
    for function, is_right in ((_summed, True), (_asked_by_len, False), (_mean, False), (_attention, False)):
        module, step = _exported(function, fuse=True)
        session, boxes = TrainingSession(step), torch.randn(3, 0, 4)
        if is_right:
            assert session.evaluate((image, boxes)) == pytest.approx(module.eval()(image, boxes).item(), rel=1e-5)
        else:
            with pytest.raises((ModelError, ArgumentError), match=EXPECTED):
                session.evaluate((image, boxes))


@pytest.mark.parametrize(
    "function",
    [
        lambda h, mask: h[mask].square().mean() + h[mask].mean(1).sum(),
        lambda h, mask: h.sum() + (h[mask].gather(1, (h[mask] > 0).sum(-1, keepdim=True) % 5)).sum(-1).sum(0),
    ],
)
def test_what_a_mask_selects_may_be_nothing(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return function(self.layer(x), mask)

    torch.manual_seed(0)
    module, x = Selecting(), torch.randn(3, 4)
    batch = ((x, torch.tensor([True, False, True])), None)
    session = TrainingSession(export_training_step(module, None, batch, torch.optim.SGD(module.parameters(), lr=0.1)))
    nothing = torch.zeros(3, dtype=torch.bool)
    loss = module(x, nothing)
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert_near(*(np.nan_to_num(np.array(one), nan=1e9) for one in (session.step((x, nothing)), loss.item())))
    for name, value in session.state_dict().items():
        assert_near(value, module.state_dict()[name].numpy())
