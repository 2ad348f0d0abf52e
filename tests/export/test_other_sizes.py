"""Steps whose axes may vary: right at every size, or refused by the name of the axis and the user's line."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from like_torch import assert_like_torch
from long_tests import mostly_long
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import ExportError, export_training_step
from gradfuse.export import comparing_sizes, pools
from gradfuse.testing import assert_gradients_close

Function = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """A function of images between two layers."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(torch.tanh(self.first(x))).mean((2, 3)))  # type: ignore[no-any-return]


SHAPES: Any = (({2: "height", 3: "width"},), (None,))


def _batch(*size: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return (torch.randn(2, 1, *size),), (torch.randn(2, 4),)


def _attention(h: Tensor) -> Tensor:
    rows = h.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(rows, rows, rows, scale=4 / h.shape[2]).transpose(1, 2).reshape(h.shape) ** 2


FIXED: dict[str, Function] = {
    "a window": lambda h: F.max_pool2d(h, (h.shape[2] // 2, 2)) ** 2,
    "a window of one number": lambda h: F.max_pool2d(h, h.shape[2] // 3) ** 2,
    "a stride": lambda h: F.avg_pool2d(h, 2, stride=(h.shape[2] // 3, 1)) ** 2,
    "patches": lambda h: F.unfold(h, (h.shape[2] // 3, 1)).reshape(h.shape[0], 3, -1, 1) ** 2,
    "windows": lambda h: h.unfold(2, h.shape[2] // 3, 1).mean(-1) ** 2,
    "a scale": _attention,
    "eps": lambda h: F.layer_norm(h, (h.shape[3],), eps=h.shape[2] / 60) ** 3,
    "delta": lambda h: F.huber_loss(h, h.detach() * 0, reduction="none", delta=h.shape[2] / 12),
    "a correction": lambda h: h / h.std((2, 3), keepdim=True, correction=h.shape[2] // 3),
    "a share": lambda h: F.dropout(h, 1 / h.shape[2]),
    "an exponent": lambda h: h / h.norm(p=h.shape[2] / 3),
    "rounded": lambda h: h * round(h.shape[2] / 7, 1),
}


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.sampled(every=3)
def test_what_follows_from_a_size_and_is_fixed_is_refused_by_axis_and_line(case: str) -> None:
    with pytest.raises(ExportError, match=r"axis 2 of 'x' .* \(test_other_sizes.py:\d+\)") as caught:
        export_training_step(Between(FIXED[case]), F.mse_loss, _batch(6, 7), dynamic_shapes=SHAPES, fuse=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["a window", "eps"])
def test_the_advice_to_make_the_axis_static_works(case: str) -> None:
    shapes: Any = (({3: "width"},), (None,))
    export_training_step(Between(FIXED[case]), F.mse_loss, _batch(6, 7), dynamic_shapes=shapes, fuse=False)


KERNEL = torch.linspace(-1.0, 1.0, 81).view(3, 3, 3, 3)
FILTER = torch.tensor(0.5 - 0.25j)
FREE: dict[str, Function] = {
    "adaptive average": lambda h: F.adaptive_avg_pool2d(h, 2) ** 2,
    "adaptive average of one axis": lambda h: F.adaptive_avg_pool2d(h, (None, 3)) ** 2,
    "adaptive average of a size": lambda h: F.adaptive_avg_pool2d(h, (h.shape[2] // 2, 4)) ** 2,
    "adaptive average of all": lambda h: F.adaptive_avg_pool2d(h, 1) ** 2,
    "adaptive maximum": lambda h: F.adaptive_max_pool2d(h, 3) ** 2,
    "areas": lambda h: F.interpolate(h, size=(4, 5), mode="area") ** 2,
    "areas by a factor": lambda h: F.interpolate(h, scale_factor=0.7, mode="area") ** 2,
    "bounds": lambda h: h.clamp(-1 / h.shape[2], h.shape[3] / 20) ** 2,
    "a bound beside a number": lambda h: (h * 3).round().add(h).clamp(-1, h.shape[2] - 7) ** 2,
    "a rounded share": lambda h: h[..., : math.ceil((1 - 0.7) * h.shape[3])] ** 2,
    "a root": lambda h: h * h.shape[2] ** 0.5,
    "a root of math": lambda h: h * math.sqrt(h.shape[2]),
    "a part": lambda h: h[:, :, : int(h.shape[2] * 0.3) + 1] ** 2,
    "the padding of an output": lambda h: (
        F.conv_transpose2d(
            F.avg_pool2d(h, 2, ceil_mode=True), KERNEL.to(h.dtype), None, 2, 1, (1 - h.shape[2] % 2, 1 - h.shape[3] % 2)
        )
        * h
    ),
    "diagonals": lambda h: (
        h * torch.diagonal(h, h.shape[3] // 3, 2, 3).sum(-1)[..., None, None]
        + torch.diag(h[0, 0], -(h.shape[2] // 3))[0]
    ),
    "a long filter": lambda h: (
        torch.fft.irfft(torch.fft.rfft(h, n=2 * h.shape[3]) / h.shape[3] * FILTER, n=2 * h.shape[3])[..., : h.shape[3]]
        ** 2
    ),
    "positions": lambda h: h * torch.arange(h.shape[2])[:, None],
    "more": lambda h: torch.cat([h, h.new_zeros(h.shape[0], 3, h.shape[2], 2)], 3) ** 2,
    "the largest": lambda h: h.topk(h.shape[2] // 2, 2)[0] ** 2,
    "uneven parts by name": lambda h: (
        torch.cat([one.sum(2, True) for one in h.tensor_split(sections=2, dim=2)], 2) ** 2
    ),
    "uneven parts": lambda h: torch.cat([part.mean(2, keepdim=True) for part in h.tensor_split(2, 2)], 2) ** 2,
}


@pytest.mark.parametrize("case", mostly_long(FREE, list(FREE)[::3]))
@pytest.mark.sampled(every=2)
def test_what_follows_from_a_size_and_exports_is_right_at_other_sizes(case: str) -> None:
    torch.manual_seed(0)
    module = Between(FREE[case])
    step = export_training_step(module, F.mse_loss, _batch(6, 7), dynamic_shapes=SHAPES, fuse=False)
    for size in ((7, 6), (8, 9), (12, 5), (13, 20)):
        batch = _batch(*size)
        native, exact = (autograd(module, F.mse_loss, batch, dtype, step) for dtype in (torch.float32, torch.float64))
        terms = 8 * max(np.abs(array).max() for array in exact.values())
        for name, result in run(step, batch, kernels=False).items():
            assert_gradients_close(result, native[name], exact[name], result.dtype, terms=terms)


class Mixed(nn.Module):
    """Whether a transposed tensor is reshaped by strides follows from the sizes, and nobody is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        return h.transpose(0, 1).reshape(h.shape) * 2


def test_a_reshape_by_strides_is_right_at_sizes_that_torch_excludes_for_itself() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.hinge_embedding_loss(output, target * 2 - 1)

    def batch(items: int) -> Any:
        torch.manual_seed(items)
        return (torch.randn(items, 6, 3),), ((torch.rand(items, 6, 4) > 0.5) * 1.0,)

    module = Mixed()
    axes: Any = (({0: "batch"},), ({0: "batch"},))
    step = export_training_step(module, loss, batch(3), dynamic_shapes=axes, fuse=False)
    for items in (4, 6, 7, 12):
        assert_like_torch(step, module, loss, batch(items))


def _halves(h: Tensor) -> Tensor:
    first, last = h.hsplit(2)
    return first.mean((1, 2, 3), keepdim=True) * last + h.mean()


def test_what_an_operator_asks_of_a_size_is_told() -> None:
    with pytest.warns(UserWarning, match=r"\(size % 2\) == 0 is taken to hold for axis 2 of 'x'.* _halves"):
        export_training_step(
            Between(lambda h: _halves(h.transpose(1, 2)).transpose(1, 2)),
            F.mse_loss,
            _batch(6, 7),
            dynamic_shapes=(({2: "height"},), (None,)),
            fuse=False,
        )


@pytest.mark.parametrize("axes", [1, 3])
def test_adaptive_average_pooling_of_other_ranks(axes: int) -> None:
    torch.manual_seed(0)
    pool: Any = {1: F.adaptive_avg_pool1d, 3: F.adaptive_avg_pool3d}[axes]
    for size in range(2, 12):
        x = torch.randn(2, *range(size, size + axes), dtype=torch.float64)
        for count in (2, 3, 5):
            got = x
            for axis in range(-axes, 0):
                got = pools.averaged(got, axis, x.shape[axis], count)
            assert (got - pool(x, count)).abs().max() <= 1e-14


class InBatch(nn.Module):
    """A function of rows after a layer."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(torch.tanh(self.layer(x)))


ROWS: Any = (({0: "batch"},), ({0: "batch"},))


def _rows(count: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return (torch.randn(count, 6),), (torch.randn(count, 6),)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by size": lambda output, y: (output - y).square().sum() / output.size(0),
    "by len": lambda output, y: (output - y).square().sum() / len(y),
    "by number": lambda output, y: (output - y).square().sum() / output.numel(),
    "contrastive": lambda output, y: F.cross_entropy(output @ y.T, torch.arange(output.shape[0])),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.sampled(every=2)
def test_a_loss_that_reads_the_size_of_the_batch_is_right_for_other_batches(case: str) -> None:
    torch.manual_seed(0)
    module, loss = InBatch(lambda h: h), LOSSES[case]
    step = export_training_step(module, loss, _rows(4), dynamic_shapes=ROWS, fuse=False)
    for count in (2, 7):
        batch = _rows(count)
        native, exact = (autograd(module, loss, batch, dtype, step) for dtype in (torch.float32, torch.float64))
        terms = 8 * max(np.abs(array).max() for array in exact.values())
        for name, result in run(step, batch, kernels=False).items():
            assert_gradients_close(result, native[name], exact[name], result.dtype, terms=terms)


@pytest.mark.parametrize(
    "function",
    [lambda h: h.view(4, -1).mean() * h, lambda h: torch.eye(4) @ h, lambda h: h + torch.zeros(4, 1)],
    ids=["a view", "a matrix", "a table"],
)
def test_a_module_for_one_size_of_the_batch_is_refused_by_axis_and_line(function: Function) -> None:
    with pytest.raises(ExportError, match=r"axis 0 of 'x' .* \(test_other_sizes.py:\d+\)"):
        export_training_step(InBatch(function), F.mse_loss, _rows(4), dynamic_shapes=ROWS, fuse=False)


def _looked_up(sizes: dict[str, float]) -> Function:
    # A size that is not known while it is traced has another text.
    return lambda h: h * sizes.get(str(h.shape[0]), 1.0)


def test_a_model_that_is_right_at_the_size_of_the_batch_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"axis 0 of 'x'.* cannot vary as dynamic_shapes says: with size 9, output '\w+' of the "
    with pytest.raises(ExportError, match=message):
        export_training_step(
            InBatch(_looked_up({"9": 2.0})), F.mse_loss, _rows(4), dynamic_shapes=ROWS, evaluation=False
        )
    # So is a model for evaluation.
    with pytest.raises(ExportError, match=message + "evaluation model"):
        export_training_step(InEvaluation(), F.mse_loss, _rows(4), dynamic_shapes=ROWS, evaluation=True)
    monkeypatch.setattr(comparing_sizes, "compare", lambda *_: None)
    export_training_step(InBatch(_looked_up({"9": 2.0})), F.mse_loss, _rows(4), dynamic_shapes=ROWS, evaluation=False)


class Picking(nn.Module):
    """Adds to the tokens of a text that have the largest numbers, which are equal where a text has a token twice."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(32, 6), nn.Linear(6, 6)
        self.function = function

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        places = h[:, 0].topk(3)[1]
        return self.layer(self.function(h + torch.zeros_like(h).index_fill(0, places, 1.0)))  # type: ignore[no-any-return]


def _tokens() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    torch.manual_seed(1)
    return (torch.tensor([3, 30, 12, 5, 0, 31]),), (torch.randn(6, 6),)


def test_a_choice_that_is_open_in_a_longer_batch_alone_hides_no_error() -> None:
    options: dict[str, Any] = {"dynamic_shapes": ROWS, "evaluation": False, "fuse": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export_training_step(Picking(lambda h: h), F.mse_loss, _tokens(), **options)
    with pytest.raises(ExportError, match=r"axis 0 of 'tokens'.* with size 13, output '\w+' of the exported"):
        export_training_step(Picking(_looked_up({"13": 2.0})), F.mse_loss, _tokens(), **options)


class Bags(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(7, 4, mode="sum", include_last_offset=last, padding_idx=1)

    def forward(self, words: Tensor, ends: Tensor) -> Tensor:
        return self.bags(words, ends)  # type: ignore[no-any-return]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.sampled(every=2)
def test_the_ends_of_bags_stay_sorted_at_other_sizes(last: bool) -> None:
    """As in the classifier of texts in PyTorch's tutorials."""
    torch.manual_seed(0)
    module = Bags(last)
    ends = torch.tensor([0, 4, 9, 11, *([15] if last else [])])
    batch: Any = (torch.randint(0, 7, (15,)), ends), (torch.tensor([0, 3, 1, 2]),)
    shapes: Any = ({0: "words"}, {0: "ends"}), ({0: "bags"},)
    step = export_training_step(module, F.cross_entropy, batch, dynamic_shapes=shapes, fuse=False)
    ends = torch.tensor([0, 2, 7, 7, 12, *([20] if last else [])])
    assert_like_torch(step, module, F.cross_entropy, ((torch.randint(0, 7, (20,)), ends), (torch.arange(5) % 4,)))


class InEvaluation(nn.Module):
    """Looks a number up by the size of the batch in evaluation mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        return result if self.training else _looked_up({"9": 2.0})(result)


def test_labels_that_look_like_ends_stay_labels() -> None:
    # They go from 0 to the size of the batch; 5, the size that is tried, would be no class.
    batch = (torch.randn(2, 4),), (torch.tensor([0, 2]),)
    module = nn.Linear(4, 3)
    step = export_training_step(module, F.cross_entropy, batch, dynamic_shapes=(({0: "n"},), ({0: "n"},)))
    assert_like_torch(step, module, F.cross_entropy, ((torch.randn(4, 4),), (torch.arange(4) % 3,)))


def test_lengths_that_are_the_size_of_an_axis_grow_with_it() -> None:
    """Those of CTC may be at most the size, and PyTorch refuses others."""

    def loss(output: Tensor, labels: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
        return F.ctc_loss(output.log_softmax(-1), labels, lengths, counts)

    torch.manual_seed(0)
    inputs = (torch.randn(7, 2, 6),)
    targets = torch.randint(1, 6, (2, 3)), torch.tensor([7, 6]), torch.tensor([3, 2])
    shapes: Any = (({0: "time"},), (None, None, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_training_step(nn.Linear(6, 6), loss, (inputs, targets), dynamic_shapes=shapes, fuse=False)


def test_axes_that_turn_out_static_are_not_compared_at_another_size() -> None:
    torch.manual_seed(0)
    auto = torch.export.Dim.AUTO
    shapes: Any = (({0: auto, 1: auto},), ({0: auto},))
    batch = (torch.randn(5, 6),), (torch.randint(0, 4, (5,)),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_training_step(nn.Linear(6, 4), F.cross_entropy, batch, dynamic_shapes=shapes, fuse=False)


def test_sizes_within_the_bounds_of_a_dimension_are_chosen() -> None:
    """The table of positions is as long as the batch, and a bound says so."""
    torch.manual_seed(0)
    dimension = torch.export.Dim("length", min=2, max=6)
    module = InBatch(lambda h: h + torch.arange(6.0)[: h.shape[0], None])
    shapes: Any = (({0: dimension},), ({0: dimension},))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_training_step(module, F.mse_loss, _rows(6), dynamic_shapes=shapes, fuse=False)


def test_sizes_have_nothing_to_do_with_those_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = comparing_sizes.compare

    def compare(*args: Any) -> None:
        seen.extend(args[3])
        original(*args)

    monkeypatch.setattr(comparing_sizes, "compare", compare)
    module = Between(lambda h: h**2)
    export_training_step(module, F.mse_loss, _batch(6, 8), dynamic_shapes=SHAPES, fuse=False, evaluation=False)
    joint = [one for one in seen if one.names == ("height", "width") and not one.beyond]
    assert joint
    for one in joint:
        height, width = one.sizes["x", 2], one.sizes["x", 3]
        assert math.gcd(height, 6) == math.gcd(width, 8) == 1
        assert height != width


def test_a_class_that_is_ignored_may_follow_from_a_size() -> None:
    """As of the answers of transformers, which are ignored where they lie beyond the end."""
    model = nn.Linear(4, 1)

    def loss(found: Tensor, place: Tensor) -> Tensor:
        scores = found[..., 0]
        return F.cross_entropy(scores, place.clamp(0, scores.size(1)), ignore_index=scores.size(1))

    def batch(items: int, length: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        torch.manual_seed(length)
        return (torch.randn(items, length, 4),), (torch.tensor([1, length, 3, length + 5, 0][:items]),)

    step = export_training_step(
        model, loss, batch(3, 8), dynamic_shapes=(({0: "batch", 1: "length"},), ({0: "batch"},))
    )
    assert "CrossEntropyLossGrad" in {node.op_type for node in step.model.graph.node}
    # Place 8 is ignored in a batch of length 8, and one like the others in a longer one.
    other = batch(5, 11)
    other[1][0][0] = 8
    native, exact = (autograd(model, loss, other, dtype, step) for dtype in (torch.float32, torch.float64))
    terms = 8 * max(np.abs(array).max() for array in exact.values())
    for kernels in (True, False):
        for name, result in run(step, other, kernels=kernels).items():
            assert_gradients_close(result, native[name], exact[name], result.dtype, terms=terms)


def test_a_text_with_places_for_pictures_has_as_many_at_other_lengths() -> None:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(6, 4), nn.Linear(4, 6)

        def forward(self, ids: Tensor, picture: Tensor) -> Tensor:
            places = ids == 5
            if not torch.compiler.is_exporting() and int(places.sum()) != picture[..., 0].numel():
                raise ValueError("not as many places as pictures have rows")
            return self.last(self.words(ids).masked_scatter(places[..., None], picture))  # type: ignore[no-any-return]

    ids = torch.tensor([[5, 5, 5, 5, 5, 5, 1, 2], [5, 5, 5, 5, 5, 5, 0, 1]])
    batch = (ids, torch.randn(2, 6, 4)), (torch.randint(6, ids.shape),)
    words = {0: "batch", 1: "length"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export_training_step(
            Shown(),
            lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
            batch,
            dynamic_shapes=((words, {0: "batch"}), (words,)),
            fuse=False,
        )


def test_sizes_that_only_fit_each_other_vary_together() -> None:
    class Fitting(nn.Module):
        def forward(self, found: Tensor, wanted: Tensor) -> Tensor:
            if not torch.compiler.is_exporting() and wanted.shape[1] != 2 * found.shape[1]:
                raise ValueError("not two targets for each item")
            return (found.mean((1, 2)) - wanted.mean(1)).square().mean()

    batch = (torch.randn(3, 4, 4),), (torch.randn(3, 8),)
    shapes: Any = (({0: "batch", 1: "items"},), ({0: "batch", 1: "targets"},))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export_training_step(nn.Linear(4, 4), Fitting(), batch, dynamic_shapes=shapes, fuse=False)


@pytest.mark.long
def test_nobody_is_warned_of_a_size_that_the_export_alone_tries() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y / (1 + y.std(0))

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y, target) + y.var(0).sum()

    torch.manual_seed(0)
    module, rows = Scaled(4, 3), {0: "batch"}
    batch = torch.randn(6, 4), torch.randn(6, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = export_training_step(module, loss, batch, dynamic_shapes=(rows, rows), fuse=False, evaluation=True)
    # As PyTorch says of the deviation of one number.
    assert not [one for one in caught if "degrees of freedom" in str(one.message)]
    assert_like_torch(step, module, loss, (batch[0][:3], batch[1][:3]))
