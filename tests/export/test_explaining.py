"""What an export cannot do is said in terms of the user's code: the place, the operator or the axis, and what to do."""

from __future__ import annotations

import contextlib
import heapq
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from training_models import autograd, run

from gradfuse import ExportError, ModelError, TrainingSession, TrainingStep, export_training_step
from gradfuse.testing import assert_gradients_close

DYNAMIC = ({0: "batch"},), ({0: "batch"},)


class Head(nn.Module):
    """A linear layer, and what is done with its output."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x))


def takes_a_number_out(h: Tensor) -> Tensor:
    return h + sum(range(int(h.sum().item()) % 3 + 1))


def converts_a_number(h: Tensor) -> Tensor:
    return h * math.gamma(h.detach().square().mean())


def loops_over_a_count(h: Tensor) -> Tensor:
    positive = (h > 0).sum().item()
    total: Tensor = sum((h for _ in range(int(positive))), start=h)
    return total


def decides_by_a_count(h: Tensor) -> Tensor:
    if int((h[:, 0] > 100).sum()) > 2:
        raise ValueError("too many")
    return h


def calls_numpy(h: Tensor) -> Tensor:
    return h * torch.from_numpy(h.detach().numpy()).mean()


def has_no_translation(h: Tensor) -> Tensor:
    values: Tensor = torch.linalg.svdvals(h)
    return h - values.sum()


def makes_a_sparse_tensor(h: Tensor) -> Tensor:
    summed: Tensor = torch.sparse.mm(h.relu().to_sparse(), h.t())
    return summed


def counts_classes(h: Tensor) -> Tensor:
    return h + F.one_hot(h.argmax(1)).sum()


def computes_complex_numbers(h: Tensor) -> Tensor:
    transformed: Tensor = torch.complex(h, h).sqrt().imag
    return transformed


def scales_by_frequency(h: Tensor) -> Tensor:
    weight = h.t() @ h
    return h + F.embedding_bag(torch.ones(len(h), 2, dtype=torch.int64), weight, mode="sum", scale_grad_by_freq=True)


def loops_over_blocks(h: Tensor) -> Tensor:
    for begin in range((h.shape[0] + 1) // 2):
        h = h + h[2 * begin : 2 * begin + 2].sum()
    return h if h.shape[0] % 2 == 0 else -h


def fixes_the_batch(h: Tensor) -> Tensor:
    return h.view(4, 5) * 1.0


def begins_at_a_value(h: Tensor) -> Tensor:
    return h + h.narrow(1, (h.sum() > 0).long(), 1)


def multiplies_wrongly(h: Tensor) -> Tensor:
    return h @ torch.zeros(4, 6)


def indexes_by_tuples(h: Tensor) -> Tensor:
    places = tuple(h.detach().argmax(1))
    return h * torch.ones(9, 9)[places, places][:, None]


def fails_in_a_library(h: Tensor) -> Tensor:
    return h * float(np.linalg.inv(np.zeros((2, 2))).sum())


BEGINS = ["the values of a tensor decide where something begins", "expected shapes to decide that"]
if TorchVersion(torch.__version__) < "2.10":
    BEGINS = ["decides by numbers that it takes out of tensors", "expected sizes and branches that follow from shapes"]


@pytest.mark.parametrize(
    "then, said",
    [
        (takes_a_number_out, ["numbers that it takes out of tensors", "expected sizes and branches that follow from"]),
        (converts_a_number, ["numbers that it takes out of tensors", "or x.item(), which may be computed with by"]),
        (loops_over_a_count, ["numbers that it takes out of tensors", "expected sizes and branches that follow from"]),
        (decides_by_a_count, ["numbers that it takes out of tensors", "expected sizes and branches that follow from"]),
        (calls_numpy, ["takes a tensor to numpy", "expected torch's functions"]),
        (makes_a_sparse_tensor, ["sparse tensor", "expected sums by index_add or scatter_add"]),
        (counts_classes, ["one_hot", "expected its argument num_classes"]),
        (has_no_translation, ["aten._linalg_svd.default", "no ONNX translation", "expected other operators"]),
        (computes_complex_numbers, ["aten.sqrt.default", "complex numbers", "expected real ones"]),
        (scales_by_frequency, ["embedding_bag by frequency", "expected F.embedding with scale_grad_by_freq"]),
        (loops_over_blocks, ["axis 0 of 'x' has size 4", "expected code for any size, or this axis static"]),
        (fixes_the_batch, ["axis 0 of 'x' has size 4", "expected code for any size, or this axis static"]),
        (indexes_by_tuples, ["numbers are taken out of tensors, as by an index that is a tuple", "of torch.stack"]),
        (fails_in_a_library, ["fails on the batch", "Singular matrix"]),
        (begins_at_a_value, BEGINS),
        (multiplies_wrongly, ["fails on the batch", "mat1 and mat2 shapes cannot be multiplied"]),
    ],
)
@pytest.mark.sampled(every=2)
def test_a_refusal_names_the_users_line(
    then: Callable[[Tensor], Tensor], said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    lines, first = inspect.getsourcelines(then)
    with pytest.raises(ExportError) as caught:
        export_training_step(Head(then), F.cross_entropy, (torch.randn(4, 6), torch.arange(4)), dynamic_shapes=DYNAMIC)
    text = str(caught.value)
    assert all(part in text for part in said), text
    places = [f"{then.__name__} (test_explaining.py:{first + offset})" for offset in range(1, len(lines))]
    assert any(place in text for place in places), text
    # What torch writes for its own developers.
    for noise in ("TORCH_LOGS", "TORCHDYNAMO", "C++", "/torch/", "gradfuse/", "draft_export", "unhinted"):
        assert noise not in text
    assert capfd.readouterr() == ("", "")


def test_a_size_that_is_the_key_of_what_is_kept_is_named() -> None:
    kept: dict[int, Tensor] = {}

    def counted(h: Tensor) -> Tensor:
        if len(h) not in kept:
            kept[len(h)] = torch.arange(len(h))
        return h + kept[len(h)][:, None]

    batch = torch.randn(8, 6), torch.arange(8) % 5
    match = r"a size that may vary is the key of a dictionary .* in .*counted \(test_explaining\.py:\d+\); expected"
    with pytest.raises(ExportError, match=match):
        export_training_step(Head(counted), F.cross_entropy, batch, dynamic_shapes=DYNAMIC)
    export_training_step(Head(counted), F.cross_entropy, batch)


@pytest.mark.parametrize("given", [{}, {"dim": 0}, {"dim": 0, "largest": False}])
def test_a_choice_between_equal_numbers_is_named(given: dict[str, Any]) -> None:
    def keeps_some(h: Tensor) -> Tensor:
        # PyTorch's order of equal numbers is not that of their places.
        chosen = torch.topk(h.sum(1).detach() * 0.0, 40, **given)[1]
        torch.topk(h.sum(), 1)
        return h * torch.zeros(len(h)).index_fill(0, chosen, 1.0).unsqueeze(1)

    torch.manual_seed(0)
    batch = torch.randn(80, 6), torch.arange(80) % 5
    with pytest.raises(ExportError, match=r"topk chooses between equal numbers, in .*keeps_"):
        export_training_step(Head(keeps_some), F.cross_entropy, batch)


@pytest.mark.parametrize("fuse", (True, False))
def test_a_module_that_computes_something_else_when_it_is_traced_is_named(fuse: bool) -> None:
    torch.manual_seed(0)
    module = Head(lambda h: h * 2.0 if torch.compiler.is_exporting() else h)
    with pytest.raises(ExportError, match=r"its loss is [\d.]+ when that is true, [\d.]+ else"):
        export_training_step(module, F.cross_entropy, (torch.randn(4, 6), torch.arange(4)), fuse=fuse)


def test_a_module_that_fails_when_it_is_traced_is_named() -> None:
    module = Head(lambda h: h.view(7) if torch.compiler.is_exporting() else h)
    with pytest.raises(
        ExportError, match=r"fails when that is true: .*shape '\[7\]' is invalid.*test_explaining.py:\d+"
    ):
        export_training_step(module, F.cross_entropy, (torch.randn(4, 6), torch.arange(4)))


class Blocks(nn.Module):
    """Pads to whole blocks of 4 tokens, unless there are whole ones, as models with local attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 4 != 0:
            x = F.pad(x, (0, 0, 0, 4 - x.shape[1] % 4))
        return self.layer(x.view(x.shape[0], x.shape[1] // 4, 4, 6).sum(2)).mean(1)  # type: ignore[no-any-return]


def _exported_blocks(module: Blocks, length: int) -> TrainingStep:
    batch = torch.randn(2, length, 6), torch.arange(2)
    shapes = {"x": {0: "batch", 1: "length"}, "target": {0: "batch"}}
    return export_training_step(module, F.cross_entropy, batch, dynamic_shapes=shapes)


def test_a_size_that_is_taken_to_be_a_multiple_is_told() -> None:
    torch.manual_seed(0)
    module = Blocks()
    line = inspect.getsourcelines(Blocks.forward)[1] + 1
    wanted = rf"axis 1 of 'x' is taken to be a multiple of 4.* forward \(test_explaining\.py:{line}\)"
    with pytest.warns(UserWarning, match=wanted):
        step = _exported_blocks(module, 8)
    # Where the advice is followed, the step is PyTorch's.
    batch = (torch.randn(3, 12, 6),), (torch.tensor([0, 4, 2]),)
    results = run(step, batch, kernels=False)
    native, exact = (autograd(module, F.cross_entropy, batch, dtype, step) for dtype in (torch.float32, torch.float64))
    for name, result in results.items():
        assert_gradients_close(result, native[name], exact[name], np.float32, terms=8)


class OfSizes(nn.Module):
    """A classifier of what a function makes of a sequence, (batch, length, 6) to (batch, length, 6)."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.function(x)).mean(1)  # type: ignore[no-any-return]


def _exported_of_sizes(function: Callable[[Tensor], Tensor], **options: Any) -> TrainingStep:
    torch.manual_seed(0)
    batch = torch.randn(3, 8, 6), torch.arange(3)
    shapes = {"x": {0: "batch", 1: "length"}, "target": {0: "batch"}}
    module = OfSizes(function)
    if "optimizer" in options:
        options = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
    return export_training_step(module, F.cross_entropy, batch, dynamic_shapes=shapes, **options)


def _at_most_512(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[1] > 512 else x


def _one_block(x: Tensor) -> Tensor:
    return x if math.ceil(x.shape[1] / 256) == 1 else x * 2.0


def _first(x: Tensor) -> Tensor:
    return x[:, :20]


def _last(x: Tensor) -> Tensor:
    return x[:, -20:]


def _long(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[1] < 5 else x


def _chunked(x: Tensor) -> Tensor:
    return torch.cat([chunk * number for number, chunk in enumerate(torch.split(x, 6, 1))], 1)


def _odd(x: Tensor) -> Tensor:
    return x if x.shape[1] % 3 else x * 2.0


def _special(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[1] == 9 else x


def _longer(x: Tensor) -> Tensor:
    return x if x.shape[1] > x.shape[0] else x * 2.0


def _checked(x: Tensor) -> Tensor:
    if x.shape[1] > 100:
        raise ValueError("too long")
    return x


POSITIONS = torch.arange(20.0)


def _with_positions(x: Tensor) -> Tensor:
    return x + POSITIONS[: x.shape[1], None]


def _of_one(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[1] == 1 else x


def _squeezed(x: Tensor) -> Tensor:
    return x.squeeze(1).mean(-1, keepdim=True) * x


def _squeezed_dims(x: Tensor) -> Tensor:
    return x.squeeze((1, 2)).sum(-1, keepdim=True) * x


def _of_several(x: Tensor) -> Tensor:
    return x / x.std(1, keepdim=True) if x.size(1) >= 2 else x


def _capped(x: Tensor) -> Tensor:
    return x * min(1.0, x.shape[1] / 100)


def _least_of_three(x: Tensor) -> Tensor:
    return x * min(100, x.shape[1], 300)


def _by_numpy(x: Tensor) -> Tensor:
    return x * float(np.max([x.shape[1], 100]))


def _by_heap(x: Tensor) -> Tensor:
    return x * heapq.nlargest(1, [x.shape[1], 100])[0]


def _at_100(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[1] == 100 else x


def _at_twice(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[1] == 4 * x.shape[0] else x


def _by_condition(x: Tensor) -> Tensor:
    return x * (1.0 + int(x.shape[1] > 50))


def _by_windows(x: Tensor) -> Tensor:
    return F.avg_pool1d(x.mT, 1 + x.shape[1] // 64, 1).mT


def _by_failing_of_torch(x: Tensor) -> Tensor:
    with contextlib.suppress(IndexError):
        return x * 2.0 + x.select(1, 20)[:, None]
    return x


def _far_from_50(x: Tensor) -> Tensor:
    return x if abs(x.shape[1] - 50) > 30 else x * 2.0


@pytest.mark.parametrize(
    "function, text",
    [
        (_at_100, "size != 100 is taken to hold for axis 1 of 'x'"),
        (_by_condition, "axis 1 of 'x' is taken to be at most 50"),
        (_by_windows, "axis 1 of 'x' is taken to be at most 63"),
        # What decides is in torch's stand-in for `min`, and in modules of Python and numpy.
        (_capped, "axis 1 of 'x' is taken to be at most 99"),
        (_least_of_three, "axis 1 of 'x' is taken to be at most 99"),
        (_by_numpy, "axis 1 of 'x' is taken to be at most 99"),
        (_by_heap, "axis 1 of 'x' is taken to be at most 99"),
        (_at_most_512, "axis 1 of 'x' is taken to be at most 512"),
        (_one_block, "axis 1 of 'x' is taken to be at most 256"),
        (_first, "axis 1 of 'x' is taken to be at most 20"),
        (_last, "axis 1 of 'x' is taken to be at most 20"),
        (_long, "axis 1 of 'x' is taken to be at least 5"),
        (_chunked, "axis 1 of 'x' is taken to be at least 7 and at most 12"),
        (_odd, "(size % 3) != 0 is taken to hold for axis 1 of 'x'"),
        (_special, "size != 9 is taken to hold for axis 1 of 'x'"),
        (_longer, "x.shape[1] > x.shape[0] is taken to hold"),
        (_checked, "axis 1 of 'x' is taken to be at most 100"),
        (_with_positions, "axis 1 of 'x' is taken to be at most 20"),
        (_of_one, "axis 1 of 'x' is taken to be at least 2"),
        (_of_several, "axis 1 of 'x' is taken to be at least 2"),
    ],
)
@pytest.mark.sampled(every=3)
def test_sizes_that_are_taken_to_be_in_a_range_are_told(function: Callable[[Tensor], Tensor], text: str) -> None:
    first = inspect.getsourcelines(function)[1]
    with pytest.warns(UserWarning) as caught:
        _exported_of_sizes(function)
    (told,) = [str(one.message) for one in caught if "is taken to" in str(one.message)]
    assert told == (
        f"export_training_step: {text}, as in this batch, since {function.__name__} (test_explaining.py:{first + 1}) "
        "asks for it"
    )


def _in_two(x: Tensor) -> Tensor:
    first, last, *_ = torch.split(x, x.shape[1] // 2, 1)
    return torch.cat([first, last * 2.0], 1)


def _by_fractions(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[1] * 0.5 % 2 == 0 else x


def _by_rounding(x: Tensor) -> Tensor:
    return x * 2.0 if round(x.shape[1] / 3) % 2 + int(x.shape[1] * 0.7) % 2 == 2 else x


def _no_square(x: Tensor) -> Tensor:
    return x * 2.0 if int(math.sqrt(x.shape[1])) ** 2 != x.shape[1] else x


def _power_of_two(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[1] & (x.shape[1] - 1) == 0 else x


def _by_ratio(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[1] / x.shape[0] > 2.1 else x


def _by_remainder(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[1] % x.shape[0] == 2 else x


@pytest.mark.parametrize(
    "function, fits",
    [
        (_capped, lambda size: size < 100),
        (_at_100, lambda size: size != 100),
        (_at_twice, lambda size: size != 12),
        (_by_condition, lambda size: size <= 50),
        (_by_windows, lambda size: size < 64),
        (_by_failing_of_torch, lambda size: size <= 20),
        (_far_from_50, lambda size: abs(size - 50) > 30),
        (_at_most_512, lambda size: size <= 512),
        (_one_block, lambda size: size <= 256),
        (_first, lambda size: size <= 20),
        (_last, lambda size: size <= 20),
        (_long, lambda size: size >= 5),
        (_chunked, lambda size: 7 <= size <= 12),
        (_odd, lambda size: size % 3),
        (_special, lambda size: size != 9),
        (_longer, lambda size: size > 3),
        (_checked, lambda size: size <= 100),
        (_in_two, lambda size: size % 2 == 0),
        (_with_positions, lambda size: size <= 20),
        (_of_one, lambda size: size > 1),
        (_of_several, lambda size: size > 1),
        (_by_fractions, lambda size: size % 4 == 0),
        (_by_rounding, lambda size: round(size / 3) % 2 == 1 == int(size * 0.7) % 2),
        (_no_square, lambda size: size not in (1, 4, 9, 100, 256)),
        (_power_of_two, lambda size: size in (1, 2, 4, 8, 256, 512)),
        (_by_ratio, lambda size: size >= 7),
        (_by_remainder, lambda size: size % 3 == 2),
        (_squeezed, lambda size: size > 1),
        (_squeezed_dims, lambda size: size > 1),
    ],
)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.sampled(every=3)
def test_a_batch_of_other_sizes_gives_what_torch_gives_or_an_error(
    function: Callable[[Tensor], Tensor], fits: Callable[[int], bool], fuse: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        step = _exported_of_sizes(function, optimizer=True, fuse=fuse)
    session = TrainingSession(step)
    module, target = OfSizes(function), torch.arange(3)
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 20, 21, 100, 101, 256, 257, 512, 513):
        x, before = torch.randn(3, size, 6), session.state_dict()
        if fits(size):
            module.load_state_dict({name: torch.from_numpy(value) for name, value in before.items()})
            output = module(x)
            rounding = 64 * np.finfo(np.float32).eps * max(1.0, output.abs().max().item())
            assert np.abs(session.evaluate(x) - output.detach().numpy()).max() <= rounding
            assert abs(session.step(x, target) - F.cross_entropy(output, target).item()) <= rounding
        else:
            for call in (lambda x=x: session.evaluate(x), lambda x=x: session.step(x, target)):
                with pytest.raises(
                    ModelError, match=r"out of range, expected .*(at (least|most) \d+|size|x.shape)|broadcast"
                ):
                    call()
            for name, value in session.state_dict().items():
                np.testing.assert_array_equal(value, before[name])


def _at_most(x: Tensor) -> Tensor:
    return x[:, : min(x.shape[1], 20)]


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, max(0, 20 - x.shape[1])))


def _of_one_and_yet_the_same(x: Tensor) -> Tensor:
    return x * 1.0 if x.shape[1] == 1 else x


def _in_whole_blocks(x: Tensor) -> Tensor:
    missing = (3 - x.shape[1] % 3) % 3
    sums = F.pad(x, (0, 0, 0, missing)).reshape(x.shape[0], -1, 3, 6).cumsum(2).reshape(x.shape[0], -1, 6)
    return sums[:, : x.shape[1]] if missing > 0 else sums


def _not_empty(x: Tensor) -> Tensor:
    if x.shape[1] == 0 or x.shape[2] != 6:
        raise ValueError("no sequence")
    return torch.cat([x[:, 1:], x[:, :1]], 1)


@pytest.mark.parametrize("function", [_at_most, _padded, _not_empty, _of_one_and_yet_the_same, _in_whole_blocks])
@pytest.mark.sampled(every=3)
def test_code_for_all_sizes_raises_no_warning(function: Callable[[Tensor], Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step = _exported_of_sizes(function)
    for length in (1, 2, 19, 20, 21, 70):
        batch = (torch.randn(4, length, 6),), (torch.arange(4),)
        results = run(step, batch, kernels=False)
        module = OfSizes(function)
        module.load_state_dict({name: torch.from_numpy(array) for name, array in step.parameters.items()})
        native, exact = (
            autograd(module, F.cross_entropy, batch, dtype, step) for dtype in (torch.float32, torch.float64)
        )
        for name, result in results.items():
            assert_gradients_close(result, native[name], exact[name], np.float32, terms=8)


def test_sizes_are_told_once_for_the_step_and_its_evaluation_model() -> None:
    with pytest.warns(UserWarning) as caught:
        _exported_of_sizes(_at_most_512, optimizer=True)
    assert len([one for one in caught if "at most 512" in str(one.message)]) == 1


class Several(nn.Module):
    """Returns a scalar, one tensor twice, and which of its elements are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(_at_most_512(x))
        return h.sum(), h, h, h > 0


def test_each_output_of_an_evaluation_model_depends_on_what_was_assumed() -> None:
    torch.manual_seed(0)
    module = Several()
    with pytest.warns(UserWarning, match="at most 512"):
        step = export_training_step(
            module,
            lambda outputs, y: (outputs[1].mean(1) * y).sum(),
            (torch.randn(3, 8, 6), torch.ones(3, 5)),
            torch.optim.SGD(module.parameters()),
            dynamic_shapes=({0: "batch", 1: "length"}, {0: "batch"}),
        )
    assert step.evaluation_model is not None
    session = ort.InferenceSession(step.evaluation_model.SerializeToString(), providers=["CPUExecutionProvider"])
    for length in (9, 513):
        x = torch.randn(2, length, 6)
        for output, native in zip(session.get_outputs(), module(x), strict=True):
            feeds = {"x": x.numpy()} | {one.name: step.parameters[one.name] for one in session.get_inputs()[:-1]}
            if length <= 512:
                (result,) = session.run([output.name], feeds)
                assert result.shape == native.shape
            else:
                with pytest.raises(Exception, match="axis 1 of 'x' out of range, expected at most 512"):
                    session.run([output.name], feeds)
