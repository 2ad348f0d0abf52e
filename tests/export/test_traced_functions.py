"""Functions that a step is traced with in other operators give what PyTorch gives, as do their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from export.decompositions.test_products import assert_same
from like_torch import assert_like_torch
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import ArgumentError, ExportError, TrainingSession, export_training_step
from gradfuse.export import traced_functions
from gradfuse.testing import assert_gradients_close

INDICES = torch.tensor([[1, 0, 4], [2, 2, 2], [0, 0, 0], [3, 1, 0]])
OFFSETS = torch.tensor([0, 2, 2, 7])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 0, -3])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.sampled(every=6)
def test_bags_of_embeddings(mode: str, padding_idx: int | None, last: bool, flat: bool) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"mode": mode, "padding_idx": padding_idx}
    indices = INDICES
    if flat:
        ends = torch.tensor([len(INDICES.flatten())])
        settings |= {"offsets": torch.cat([OFFSETS, ends]) if last else OFFSETS, "include_last_offset": last}
        indices = INDICES.flatten()
    assert_same(
        lambda weight: traced_functions.embedding_bag(indices, weight, **settings),
        lambda weight: F.embedding_bag(indices, weight, **settings),
        torch.randn(5, 4),
    )


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_bags_of_weighted_embeddings(padding_idx: int | None) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"mode": "sum", "padding_idx": padding_idx}
    assert_same(
        lambda weight, each: traced_functions.embedding_bag(INDICES, weight, per_sample_weights=each, **settings),
        lambda weight, each: F.embedding_bag(INDICES, weight, per_sample_weights=each, **settings),
        torch.randn(5, 4),
        torch.randn(4, 3),
    )


@pytest.mark.parametrize("correction", [0, 1, 2])
@pytest.mark.parametrize("frequent", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (1, 7), (7,)])
@pytest.mark.sampled(every=6)
def test_covariances(correction: int, frequent: bool, weighted: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "correction": correction,
        "fweights": torch.tensor([1, 2, 3, 1, 1, 0, 4]) if frequent else None,
        "aweights": torch.linspace(0.5, 1.5, 7, dtype=torch.float64) if weighted else None,
    }
    assert_same(lambda x: traced_functions.cov(x, **settings), lambda x: torch.cov(x, **settings), torch.randn(shape))


@pytest.mark.parametrize("shape", [(3, 7), (7,)])
def test_correlations(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    assert_same(traced_functions.corrcoef, torch.corrcoef, torch.randn(shape))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(3, 4), (3, 1), (3,)])
@pytest.mark.sampled(every=3)
def test_gaussian_losses(reduction: str, full: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    variance = torch.rand(shape)
    # Below the bound, which hides no gradient.
    variance[0] = 0.01
    settings: dict[str, Any] = {"full": full, "eps": 0.05, "reduction": reduction}
    assert_same(
        lambda x, y, v: traced_functions.gaussian_nll_loss(x, y, v, **settings),
        lambda x, y, v: F.gaussian_nll_loss(x, y, v, **settings),
        torch.randn(3, 4),
        torch.randn(3, 4),
        variance,
    )


def test_quantization() -> None:
    x = torch.linspace(-3.0, 3.0, 241, requires_grad=True)
    scales, zeros = torch.tensor([0.1, 0.3, 0.7]), torch.tensor([0, 3, -2], dtype=torch.int32)
    rows = torch.linspace(-3.0, 3.0, 240).view(80, 3).requires_grad_()
    for ours, native, given in (
        (traced_functions.fake_quantize_per_tensor_affine, torch.fake_quantize_per_tensor_affine, (x, 0.1, 3, -8, 7)),
        (
            traced_functions.fake_quantize_per_channel_affine,
            torch.fake_quantize_per_channel_affine,
            (rows, scales, zeros, 1, -8, 7),
        ),
    ):
        results = []
        for function in (ours, native):
            value = function(*given)
            results.append((value, torch.autograd.grad(value.square().sum(), given[0])[0]))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shapes", [((4, 3), (4, 1)), ((4, 1), (4, 3)), ((1, 3), (4, 3)), ((2, 4, 3), (1, 1, 3))])
def test_taking_along_an_axis(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    for dim in (0, -1):
        indices = torch.randint(0, shapes[0][dim], shapes[1])
        assert_same(
            lambda x, i=indices, d=dim: traced_functions.take_along_dim(x, i, d),
            lambda x, i=indices, d=dim: torch.take_along_dim(x, i, d),
            torch.randn(shapes[0]),
        )


def test_taking_from_all_elements() -> None:
    indices = torch.tensor([3, 0, 5])
    assert_same(
        lambda x: traced_functions.take_along_dim(x, indices), lambda x: torch.take_along_dim(x, indices),
        torch.randn(2, 3),
    )  # fmt: skip


@pytest.mark.parametrize("shapes", [((2, 3), (4, 5)), ((3,), (2, 2)), ((2, 1, 3), (2,)), ((), (2,))])
def test_products_of_kronecker(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    assert_same(traced_functions.kron, torch.kron, *(torch.randn(shape) for shape in shapes))


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3)])
def test_filled_diagonals(shape: tuple[int, ...]) -> None:
    assert_same(
        lambda x: traced_functions.fill_diagonal_(x * 1.0, 7.0),
        lambda x: (x * 1.0).fill_diagonal_(7.0),
        torch.randn(shape),
    )


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(6, 16), nn.EmbeddingBag(9, 16, padding_idx=2)
        self.function = function

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x) + self.table(tokens)
        result: Tensor = self.function(hidden)
        return result.flatten(1)[:, :5]


def _numbered(h: Tensor) -> Tensor:
    return h * torch.linspace(-1.0, 2.0, h.shape[0]).unsqueeze(1)


def _similar(h: Tensor) -> Tensor:
    return (h @ h.T).fill_diagonal_(-torch.inf).softmax(1) @ h


def _of_matrices(h: Tensor) -> Tensor:
    matrices = h.view(-1, 4, 4)
    positive = matrices @ matrices.mT + torch.eye(4)
    factor = torch.linalg.cholesky(positive)
    solved = torch.linalg.solve(positive, matrices) + torch.linalg.inv(positive)
    result: Tensor = solved + factor + torch.logdet(positive)[:, None, None]
    return result


def _by_masks(h: Tensor) -> Tensor:
    columns, rows = h[0].detach() > 0.0, h[:, 0].detach() > 0.0
    h = h.clone()
    h[:, columns] *= 0.5
    h[None, :, columns] = h[:, columns].flip(0)
    h[rows, h.argmax(1)[rows]] = 2.0
    matrices = h.view(-1, 4, 4).clone()
    matrices[..., 1, columns[:4]] = h[:, :1]
    matrices[:, columns.view(4, 4)] += h[:, 1:2]
    return torch.cat([matrices.flatten(1), h[rows.byte()].sum(0).expand_as(h)], 1)


def _by_ranges(h: Tensor) -> Tensor:
    n = h.shape[0]
    chosen = torch.zeros_like(h)
    chosen[range(n), h.argmax(1)] = 1.0
    return h * chosen + h[range(n), h.argmin(1)].unsqueeze(1) / h.new_tensor([n, len(h) + 1]).sum()


def _by_arrays(h: Tensor) -> Tensor:
    places = torch.from_numpy(np.arange(h.shape[0])).unsqueeze(1)
    shares = np.linspace(0, 1, h.shape[0])
    return h * places + torch.tensor(shares, dtype=torch.float).unsqueeze(1)


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    _by_masks,
    _numbered,
    _by_arrays,
    _by_ranges,
    _similar,
    lambda h: torch.cdist(h, h[:2].detach() + 1.0) @ h[:2],
    lambda h: torch.take_along_dim(h, h.argmax(1, keepdim=True), 1) * h,
    lambda h: torch.kron(h, torch.tensor([[1.0, 2.0]])),
    lambda h: h.sigmoid().cumprod(1) * h.sigmoid().cumprod(0),
    lambda h: h - h.median(1, keepdim=True)[0] + h.median(),
    lambda h: torch.zeros_like(h).scatter_reduce(0, torch.arange(len(h))[:, None] // 2 + 0 * h.long(), h, "mean"),
    lambda h: torch.fake_quantize_per_tensor_affine(h, 0.25, 0, -8, 7),
    lambda h: h + F.gaussian_nll_loss(h, h.flip(1), h.square() + 0.1),
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.sampled(every=3)
def test_steps_have_any_number_of_items(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = Applied(function)

    def batch(items: int, length: int) -> Any:
        return (torch.randn(items, 6), torch.randint(0, 9, (items, length))), (torch.arange(items) % 5,)

    shapes = ({0: "batch"}, {0: "batch", 1: "length"}), ({0: "batch"},)
    step = export_training_step(module, F.cross_entropy, batch(3, 4), dynamic_shapes=shapes)
    for sizes in itertools.product((4, 7), (2, 6)):
        other = batch(*sizes)
        results = run(step, other, kernels=False)
        native, exact = (
            autograd(module, F.cross_entropy, other, dtype, step) for dtype in (torch.float32, torch.float64)
        )
        for name, result in results.items():
            terms = 16 * max(np.abs(array).max() for array in exact.values())
            assert_gradients_close(result, native[name], exact[name], result.dtype, terms=terms)


PADDINGS = ("zeros", "border", "reflection")
_LARGEST = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", range(len(PADDINGS)))
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.sampled(every=4)
def test_samples_at_exact_pixels_have_torchs_gradients(dtype: torch.dtype, padding: int, align_corners: bool) -> None:
    """A place that is rounded once more would lie in the pixel before, with another gradient."""
    torch.manual_seed(0)
    for height, width in ((5, 6), (7, 9), (2, 4), (8, 11), (13, 28)):
        grid = F.affine_grid(torch.eye(2, 3, dtype=dtype)[None], [1, 2, height, width], align_corners=align_corners)
        shifted = grid + 2.0 / (width - 1 if align_corners else width)
        for places in (grid, shifted, torch.randint(-3, 4, grid.shape).to(dtype), 3.0 * torch.randn_like(grid)):
            for mode in (0, 1):
                results = []
                picture = torch.randn(1, 2, height, width, dtype=dtype)
                for function in (traced_functions.grid_sampler, torch.grid_sampler):
                    leaves = picture.clone().requires_grad_(), places.clone().requires_grad_()
                    sampled = function(*leaves, mode, padding, align_corners)
                    weights = torch.linspace(-1, 2, sampled.numel(), dtype=dtype).view(sampled.shape)
                    results.append((sampled, *torch.autograd.grad((weights * sampled).sum(), leaves)))
                for got, wanted in zip(*results, strict=True):
                    largest = max(_LARGEST, float(wanted.detach().abs().max()))
                    assert_gradients_close(got, wanted, wanted.double(), dtype, terms=largest)


def _of_selected(h: Tensor) -> Tensor:
    """As circle loss sums up the pairs that a mask selects."""
    found = h[h.detach() > 0.0]
    return found.logsumexp(0) + torch.logsumexp(found.view(1, -1), (0, 1), keepdim=True) * h


def _resized(h: Tensor) -> Tensor:
    """As AWD-LSTM makes the mask of its embedding."""
    return h * h.data.new().resize_((len(h), 1)).fill_(0.5).expand_as(h)


@pytest.mark.parametrize("function", [_of_selected, _resized])
def test_functions_of_what_is_found(function: Callable[[Tensor], Tensor]) -> None:
    class Found(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return function(super().forward(x))

    torch.manual_seed(0)
    module = Found(4, 3)
    batches = [((torch.randn(items, 4),), (torch.randn(items, 3),)) for items in (5, 7)]
    step = export_training_step(module, F.mse_loss, batches[0], dynamic_shapes=(({0: "n"},), ({0: "n"},)), fuse=False)
    assert_like_torch(step, module, F.mse_loss, batches[1])


def test_a_tensor_that_is_resized_is_named() -> None:
    class Resized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone().resize_(2, 4))

    with pytest.raises(ExportError, match=r"calls resize_ of a tensor of shape \(5, 4\); expected torch\.empty"):
        export_training_step(Resized(4, 3), F.mse_loss, (torch.randn(5, 4), torch.randn(2, 3)))


def test_losses_by_vmap_are_one_for_all_items() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        def of_item(item: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(item[None], label[None])

        result: Tensor = torch.func.vmap(of_item)(output, target).mean()
        return result

    module, counts = nn.Linear(4, 3), set()
    for items in (3, 6):
        batch = torch.randn(items, 4), torch.arange(items) % 3
        step = export_training_step(module, loss, batch, fuse=False)
        assert_like_torch(step, module, loss, batch)
        counts.add(len(step.model.graph.node))
    assert len(counts) == 1


def test_classes_may_be_bytes() -> None:
    module = nn.Linear(4, 3)
    batch = torch.randn(5, 4), torch.randint(0, 3, (5,), dtype=torch.uint8)
    step = export_training_step(module, nn.CrossEntropyLoss(), batch)
    assert_like_torch(step, module, F.cross_entropy, batch)
    batch[1][0] = 3
    with pytest.raises(ArgumentError, match=r"'target'\[0\] is 3; expected 0 to 2"):
        TrainingSession(step).step(*batch)


class SpatialTransformer(nn.Module):
    """Begins as the identity, as most do."""

    def __init__(self, mode: str, padding: str, align_corners: bool) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.eye(2, 3)[None])
        self.gain = nn.Parameter(torch.ones(2, 1, 1))
        self.settings = {"mode": mode, "padding_mode": padding, "align_corners": align_corners}

    def forward(self, x: Tensor) -> Tensor:
        theta = self.theta.expand(x.shape[0], 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=bool(self.settings["align_corners"]))
        return F.grid_sample(self.gain * x, grid, **self.settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mode, padding, align_corners",
    [
        ("bilinear", "zeros", False),
        ("bilinear", "border", True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("bilinear", "zeros", True),
                ("bilinear", "border", False),
                ("bilinear", "reflection", False),
                ("bilinear", "reflection", True),
                ("nearest", "border", False),
                ("bicubic", "reflection", True),
            )
        ),
    ],
)
@pytest.mark.sampled(every=3)
def test_a_spatial_transformer_at_the_identity(mode: str, padding: str, align_corners: bool) -> None:
    torch.manual_seed(0)
    module = SpatialTransformer(mode, padding, align_corners)
    batch = torch.randn(2, 2, 5, 6), torch.randn(2, 2, 5, 6)
    step = export_training_step(module, nn.MSELoss(), batch, dynamic_shapes=({0: "items"}, {0: "items"}))
    if mode == "bilinear":
        # Those of the grid are for float32 what float64 has on the other side of a pixel.
        native = torch.autograd.grad(F.mse_loss(module(batch[0]), batch[1]), list(module.parameters()))
        session = TrainingSession(step)
        session.step(*batch)
        for got, wanted in zip(session.gradients.values(), native, strict=True):
            assert_gradients_close(got, wanted, wanted.double(), np.float32, terms=float(wanted.abs().max()))
    else:
        assert_like_torch(step, module, nn.MSELoss(), batch)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 6)])
@pytest.mark.parametrize("driver", [None, "gels", "gelsd"])
@pytest.mark.sampled(every=3)
def test_least_squares(shape: tuple[int, int], driver: str | None) -> None:
    torch.manual_seed(0)
    matrix, columns = torch.randn(2, *shape), torch.randn(2, shape[0], 2)
    native, ours = (f(matrix, columns, driver=driver) for f in (torch.linalg.lstsq, traced_functions.least_squares))
    assert ours.residuals.shape == native.residuals.shape
    for part in range(2 if native.residuals.numel() else 1):
        assert_same(
            lambda a, b, k=part: traced_functions.least_squares(a, b, driver=driver)[k],
            lambda a, b, k=part: torch.linalg.lstsq(a, b, driver=driver)[k],
            matrix,
            columns,
        )
    vector = torch.linalg.lstsq(matrix[0], columns[0, :, 0]).solution
    assert_gradients_close(
        traced_functions.least_squares(matrix[0], columns[0, :, 0]).solution,
        vector,
        torch.linalg.lstsq(matrix[0].double(), columns[0, :, 0].double()).solution,
        "float32",
        terms=100.0,
    )


class Placed(nn.Module):
    """Moves pictures by what a convolution finds in them, to places that a function gives."""

    def __init__(self, place: Callable[[Tensor], Tensor], **settings: Any) -> None:
        super().__init__()
        self.place, self.settings = place, settings
        self.picture, self.offsets = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        places = self.place(self.offsets(x).permute(0, 2, 3, 1))
        return F.grid_sample(self.picture(x), places, align_corners=False, **self.settings)


def clamped(offsets: Tensor) -> Tensor:
    height, width = offsets.shape[1:3]
    x, y = (offsets * 4 + 2).unbind(-1)
    x, y = x.clamp(0, width - 1), y.clamp(min=-height // 2, max=2.5)
    return torch.stack([x / width * 2 - 1, y / height * 2 - 1], -1)


def around_centres(offsets: Tensor) -> Tensor:
    height, width = offsets.shape[1:3]
    y, x = torch.meshgrid(
        torch.linspace(0.5, height - 0.5, height), torch.linspace(0.5, width - 0.5, width), indexing="ij"
    )
    centres = torch.stack([x / width, y / height], -1).to(offsets.dtype)
    return 2 * (centres + torch.tanh(offsets) / 5) - 1


def turned(offsets: Tensor) -> Tensor:
    turns = torch.tanh(offsets.mean((1, 2))).repeat_interleave(3, 1).view(-1, 2, 3) / 2 + 0.1
    return F.affine_grid(turns, [len(turns), 1, *offsets.shape[1:3]], align_corners=True)


@pytest.mark.parametrize("place, padding", [(clamped, "reflection"), (around_centres, "border"), (turned, "zeros")])
def test_pictures_of_any_size_are_sampled_at_places_that_follow_from_it(
    place: Callable[[Tensor], Tensor], padding: str
) -> None:
    torch.manual_seed(0)
    module = Placed(place, padding_mode=padding)
    batch = torch.randn(2, 3, 6, 7), torch.randn(2, 4, 6, 7)
    axes = {0: "batch", 2: "height", 3: "width"}
    step = export_training_step(module, F.mse_loss, batch, dynamic_shapes=(axes, axes), verify="quick")
    assert not any(node.op_type == "GatherND" for node in step.model.graph.node)
    assert_like_torch(step, module, F.mse_loss, (torch.randn(3, 3, 5, 9), torch.randn(3, 4, 5, 9)))


NUMBERS: list[Callable[[Any], Any]] = [
    lambda size: -size // 2,
    lambda size: (3 - size) // 2,
    lambda size: size // -2,
    lambda size: -(-size // 4) * 4 - size,
    lambda size: (size - 9) // (size - 20),
    lambda size: (size - 20) // 3 + (size - 20) % 3,
]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_follow_from_a_size_round_as_in_python(number: Callable[[Any], Any]) -> None:
    class Moved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = number(x.shape[1])
            moved: Tensor = super().forward(x).clamp(min=found) + found + torch.full_like(x, found)
            return moved

    torch.manual_seed(0)
    module, axes = Moved(2, 2), {1: "length"}
    batch = torch.randn(2, 9, 2) * 9, torch.randn(2, 9, 2)
    step = export_training_step(module, F.mse_loss, batch, dynamic_shapes=(axes, axes), verify="quick")
    for length in (4, 7, 22):
        assert_like_torch(step, module, F.mse_loss, (torch.randn(2, length, 2) * 9, torch.randn(2, length, 2)))


def filtered(x: Tensor) -> Tensor:
    result: Tensor = torch.fft.irfft2(torch.fft.rfft2(x, norm="ortho") * 0.5, s=x.shape[2:], norm="ortho")
    return result


def convolved(x: Tensor) -> Tensor:
    sizes = [2 * size for size in x.shape[2:]]
    spectrum = torch.fft.rfftn(x, s=sizes, dim=(2, 3))
    result: Tensor = torch.fft.irfftn(spectrum * spectrum, s=sizes, dim=(2, 3))[:, :, : x.shape[2], : x.shape[3]]
    return result


@pytest.mark.parametrize("function", [filtered, convolved])
def test_transforms_of_several_axes_of_any_size(function: Callable[[Tensor], Tensor]) -> None:
    class Transformed(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return function(super().forward(x))

    torch.manual_seed(0)
    module, axes = Transformed(3, 2, 1), {2: "height", 3: "width"}
    batch = torch.randn(2, 3, 6, 7), torch.randn(2, 2, 6, 7)
    step = export_training_step(module, F.mse_loss, batch, dynamic_shapes=(axes, axes), verify="quick")
    for height, width in ((4, 9), (7, 10)):
        batch = torch.randn(2, 3, height, width), torch.randn(2, 2, height, width)
        assert_like_torch(step, module, F.mse_loss, batch)
