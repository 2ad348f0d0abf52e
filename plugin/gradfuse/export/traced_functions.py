"""Functions of torch that tracing replaces by operators whose gradients and sizes are known.

They are replaced at their calls, because a traced program would lose their meaning. This module imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export import in_vmap
from gradfuse.export.decompositions import products
from gradfuse.export.reporting import refusal

_NEAREST, _BICUBIC = 1, 2
_ZEROS, _REFLECTION = 0, 2
"""ATen's numbers of interpolations and paddings."""
_AXES_OF_PICTURES = 4


def grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: Any = None
) -> Tensor:
    modes, paddings = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    return grid_sampler(input, grid, modes.index(mode), paddings.index(padding_mode), bool(align_corners))


def grid_sampler(input: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    """Sample pictures as PyTorch's kernel does, with positions equal to the last digit, and its gradients at exact
    pixels."""
    if input.dim() != _AXES_OF_PICTURES or mode == _BICUBIC:
        return torch.grid_sampler(input, grid, mode, padding, align_corners)
    items, channels, *sizes = input.shape
    x, y = (
        _place(one, size, padding, align_corners).unsqueeze(1)
        for one, size in zip(grid.unbind(-1), reversed(sizes), strict=True)
    )
    height, width = sizes
    planes = input.flatten(2)

    def pixels(x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        column, row = (torch.where(inside, one, 0.0).to(torch.int64) for one in (x, y))
        weight = inside.to(input.dtype) if weight is None else torch.where(inside, weight, 0.0)
        # Within planes, not by indices of all four axes, which onnxruntime reads number by number.
        places = (row * width + column).flatten(2).expand(-1, channels, -1)
        return planes.gather(2, places).view(items, channels, *x.shape[2:]) * weight

    if mode == _NEAREST:
        sampled = pixels(x.round(), y.round(), None)
        # PyTorch's gradient of the grid is zeros, where none would be refused.
        return sampled + 0.0 * grid.sum() if grid.requires_grad else sampled
    left, top = x.detach().floor(), y.detach().floor()
    to_right, to_bottom = x - left, y - top
    columns = ((left, 1.0 - to_right), (left + 1.0, to_right))
    rows = ((top, 1.0 - to_bottom), (top + 1.0, to_bottom))
    corners = [pixels(column, row, across * down) for row, down in rows for column, across in columns]
    return corners[0] + corners[1] + corners[2] + corners[3]


def bincount(input: Tensor, weights: Tensor | None = None, minlength: Any = 0) -> Tensor:
    """The same with `minlength` counts, if any; an index that needs more is out of range of the scatter."""
    if not private.is_symbolic(minlength) and not minlength:
        return torch.bincount(input, weights)
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros((minlength,)).scatter_add(0, input.long(), weights)


def exceeds_minlength(counts: Tensor, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> bool:
    """Whether a call of `bincount` gave more counts than its arguments ask for."""
    return len(counts) > minlength > 0


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: Any = None) -> Tensor:
    """Return where pixels come from, by places that are PyTorch's own to the last digit where sizes are known."""
    if len(size) != _AXES_OF_PICTURES:
        return F.affine_grid(theta, size, align_corners)  # type: ignore[arg-type]
    known = all(isinstance(one, int) for one in size[2:])
    with private.untraced() if known else contextlib.nullcontext():
        columns, rows = (_centres(one, theta.dtype, bool(align_corners)) for one in (size[3], size[2]))
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        places = torch.stack([x, y, torch.ones_like(x)], -1).view(-1, 3)
    grid: Tensor = places @ theta.transpose(1, 2)
    return grid.view(-1, *size[2:], 2)


def _centres(count: Any, dtype: torch.dtype, align_corners: bool) -> Tensor:
    if isinstance(count, int) and count <= 1:
        return torch.zeros(count, dtype=dtype)
    corners = linspace(-1, 1, count, dtype=dtype)
    if not align_corners:
        corners = corners * (count - 1) / count
    elif not isinstance(count, int):
        # A single place is in the middle.
        corners = corners * torch.sym_min(count - 1, 1)  # type: ignore[no-untyped-call]
    return corners


def _place(coordinate: Tensor, size: Any, padding: int, align_corners: bool) -> Tensor:
    """Return where a coordinate of [-1, 1] is in pixels; it has no gradient at the border or beyond it."""
    place = (coordinate + 1.0) * ((size - 1) / 2) if align_corners else _fused(coordinate + 1.0, size / 2)
    if padding == _ZEROS:
        return place
    if padding == _REFLECTION:
        first, span = (0.0, size - 1) if align_corners else (-0.5, size)
        # Reflected once at the first border, and then at the last one as often as it takes.
        distance = torch.where(place < first, first - place, place - first)
        distance = distance - torch.trunc(distance.detach() / (2 * span)) * (2 * span)
        place = torch.where(distance > span, 2 * span - distance, distance) + first
        if align_corners and isinstance(size, int) and size == 1:
            place = torch.zeros_like(coordinate)
    last = size - 1
    return torch.where((place > 0.0) & (place < last), place, place.detach().clamp(0, last))


def _fused(tensor: Tensor, factor: Any) -> Tensor:
    """Return `tensor * factor - 0.5`, rounded once, as the processor does where PyTorch's kernel computes it.

    The factor has few digits. With a second rounding a pixel's place would lie in the pixel before it.
    """
    wide = tensor.detach().double()
    product = wide * factor
    # The first half of the digits of a number, by which its product is exact.
    scaled = wide * _HALF_OF_DIGITS
    first = scaled - (scaled - wide)
    rest = (first * factor - product) + (wide - first) * factor
    difference = product - 0.5
    moved = difference - product
    rest = rest + ((product - (difference - moved)) + (-0.5 - moved))
    exact = (difference + rest).to(tensor.dtype)
    rounded = tensor * factor - 0.5
    result: Tensor = rounded + (exact - rounded).detach()
    return result


_HALF_OF_DIGITS = 2.0**27 + 1.0


def linspace(start: Any, end: Any, steps: Any, **settings: Any) -> Tensor:
    """Return as many numbers as an axis is long, from both ends, as PyTorch does."""
    dtype = settings.get("dtype") or torch.get_default_dtype()
    numbers = all(isinstance(one, (int, float, torch.SymInt, torch.SymFloat)) for one in (start, end))
    if not isinstance(steps, torch.SymInt) or not numbers or not dtype.is_floating_point or settings.get("out"):
        return torch.linspace(start, end, steps, **settings)
    length: Any = steps
    places = torch.arange(length, device=settings.get("device"))
    count = torch.zeros(1, dtype=torch.int64, device=settings.get("device")) + length
    first, last = (torch.zeros_like(count, dtype=dtype) + one for one in (start, end))
    step = (last - first) / (count - 1).clamp(min=1).to(dtype)
    rising = first + step * places.to(dtype)
    falling = last - step * (count - 1 - places).to(dtype)
    # A single number is the first.
    return torch.where((places < count // 2) | (count == 1), rising, falling)


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Look up rows, and reduce those of each bag: a row of a matrix of indices, or a piece of a vector of them."""
    if scale_grad_by_freq:
        # Of what PyTorch's kernel for CPUs gives there, `untraceable` tells the user.
        raise NotImplementedError("embedding_bag with scale_grad_by_freq")
    if max_norm is not None or input.is_floating_point():
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight, padding_idx)
    number = weight.shape[0]
    padding = None if padding_idx is None else padding_idx % number
    counted = torch.ones_like(input, dtype=torch.bool) if padding is None else input != padding
    counted = counted.unsqueeze(-1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is None:
        return _reduced(rows, counted, mode, lambda x, kind: x.sum(1) if kind == "sum" else x.max(1)[0])
    bags = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    index = torch.bucketize(torch.arange(input.shape[0], device=input.device), offsets[1:], right=True)
    if include_last_offset:
        # What follows the last bag is in none.
        counted = counted & (index < bags).unsqueeze(-1)
        index = index.clamp(max=bags - 1)
    index = index.unsqueeze(-1)

    def reduce(x: Tensor, kind: str) -> Tensor:
        places = index.expand(x.shape)
        if kind == "sum":
            return x.new_zeros((bags, x.shape[1])).scatter_add(0, places, x)
        return x.new_full((bags, x.shape[1]), -torch.inf).scatter_reduce(0, places, x, "amax")

    return _reduced(rows, counted, mode, reduce)


def _reduced(rows: Tensor, counted: Tensor, mode: str, reduce: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Return the sum, mean or maximum of the rows that count in each bag; zeros for bags without any."""
    if mode == "sum":
        return reduce(torch.where(counted, rows, 0.0), "sum")
    number = reduce(counted.to(rows.dtype), "sum")
    if mode == "max":
        return torch.where(number > 0.0, reduce(torch.where(counted, rows, -torch.inf), "max"), 0.0)
    return reduce(torch.where(counted, rows, 0.0), "sum") / number.clamp(min=1.0)


def _of_classes(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss whose classes may be bytes, which torch.export cannot trace."""

    def of_classes(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return loss(input, target.long() if target.dtype == torch.uint8 else target, *args, **kwargs)

    return of_classes


def nll_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute in float32 under autocast, as what PyTorch calls within the traced operator does."""
    if torch.is_autocast_enabled(input.device.type) and input.dtype in (torch.bfloat16, torch.float16):
        input = input.float()
    return _of_classes(F.nll_loss)(input, target, *args, **kwargs)


def _transposed(convolve: Callable[..., Tensor], axes: int) -> Callable[..., Tensor]:
    """Return a transposed convolution whose padding of the output may follow from a size.

    ONNX has it as a constant. The most that it can be is computed, and what is beyond the output is cut off.
    """

    def transposed(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        ends = list(output_padding) if isinstance(output_padding, (tuple, list)) else [output_padding]
        if not any(map(private.is_symbolic, ends)):
            return convolve(input, weight, bias, stride, padding, output_padding, groups, dilation)
        (steps, spaces, ends) = (
            list(one) * (axes // len(one)) if isinstance(one, (tuple, list)) else [one] * axes
            for one in (stride, dilation, ends)
        )
        most = [max(pair) - 1 for pair in zip(steps, spaces, strict=True)]
        result = convolve(input, weight, bias, stride, padding, most, groups, dilation)
        for axis, (end, limit) in enumerate(zip(ends, most, strict=True), input.dim() - axes):
            result = result.narrow(axis, 0, result.shape[axis] - limit + end)
        return result

    return transposed


def diagonal(input: Tensor, offset: Any = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The same with an offset that follows from a size."""
    if not private.is_symbolic(offset):
        return torch.diagonal(input, offset, dim1, dim2)
    matrix = input.movedim((dim1, dim2), (-2, -1))
    rows, columns = matrix.shape[-2:]
    down, right = torch.sym_max(-offset, 0), torch.sym_max(offset, 0)  # type: ignore[no-untyped-call]
    count = torch.sym_min(rows - down, columns - right)  # type: ignore[no-untyped-call]
    places = torch.arange(count, device=input.device)
    return matrix[..., places + down, places + right]


def diag(input: Tensor, diagonal: Any = 0) -> Tensor:
    """Likewise; a matrix with a diagonal is left to torch."""
    if not private.is_symbolic(diagonal) or input.dim() == 1:
        return torch.diag(input, diagonal)
    return _diagonal(input, diagonal)


_diagonal = diagonal


def one_hot(tensor: Tensor, num_classes: Any = -1) -> Tensor:
    """The same with as many classes as a size says, which torch.export takes for a constant."""
    if not private.is_symbolic(num_classes):
        return F.one_hot(tensor, num_classes)
    return tensor.new_zeros((*tensor.shape, num_classes)).scatter(-1, tensor.unsqueeze(-1), 1)


def _transform(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a Fourier transform of as many elements as a size says, for which torch.export pads by a constant."""

    def transform(input: Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Tensor:
        if private.is_symbolic(n):
            size = input.shape[dim]
            if private.known_true(n >= size):
                pads = [0, 0] * (input.dim() - dim % input.dim() - 1)
                input, n = F.pad(input, [*pads, 0, n - size]), None
            elif private.known_true(n <= size):
                input, n = input.narrow(dim, 0, n), None
        return function(input, n, dim, norm)

    return transform


def irfft(input: Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The same to as many elements as a size says: the real part of the transform of all frequencies.

    onnxruntime's transform of one half takes the size of its result for a constant.
    """
    count = input.shape[dim]
    length = 2 * (count - 1) if n is None else n
    if not private.is_symbolic(length) or not private.known_true(count == length // 2 + 1):
        return torch.fft.irfft(input, n, dim, norm)  # type: ignore[no-any-return]
    others = input.narrow(dim, 1, length - count).flip(dim).conj()
    whole: Tensor = torch.fft.ifft(torch.cat([input, others], dim), None, dim, norm)
    return whole.real


def irfftn(input: Tensor, s: Any = None, dim: Any = None, norm: str | None = None) -> Tensor:
    """Likewise, of several axes."""
    count = len(s if s is not None else dim if dim is not None else input.shape)
    axes = list(range(-count, 0)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    sizes = [*(input.shape[axis] for axis in axes[:-1]), None] if s is None else list(s)
    as_they_are = any(isinstance(size, int) and size < 0 for size in sizes)
    if as_they_are or len(sizes) != len(axes) or not any(map(private.is_symbolic, (*sizes, *input.shape))):
        return torch.fft.irfftn(input, s, dim, norm)  # type: ignore[no-any-return]
    for size, axis in zip(sizes[:-1], axes[:-1], strict=True):
        same = private.known_true(size == input.shape[axis])
        input = torch.fft.ifft(input, None if same else size, axis, norm)
    return irfft(input, sizes[-1], axes[-1], norm)


def irfft2(input: Tensor, s: Any = None, dim: Any = (-2, -1), norm: str | None = None) -> Tensor:
    return irfftn(input, s, dim, norm)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Compute PyTorch's loss without its check, which is made when PyTorch runs the step."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    # The bound leaves the gradient alone.
    var = torch.where(var < eps, var + (eps - var).detach(), var)
    loss: Tensor = 0.5 * (var.log() + (input - target).square() / var)
    if full:
        loss = loss + _HALF_LOG_2_PI
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


_HALF_LOG_2_PI = 0.9189385332046727


def fake_quantize_per_tensor_affine(
    input: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int, **named: Any
) -> Tensor:
    """Round to steps; gradients pass for numbers in range."""
    places = torch.round(input * (1.0 / scale)) + zero_point
    inside = (places >= quant_min) & (places <= quant_max)
    passed = torch.where(inside, input, 0.0)
    rounded = (places.clamp(quant_min, quant_max) - zero_point) * scale
    result: Tensor = rounded.detach() + (passed - passed.detach())
    return result


def fake_quantize_per_channel_affine(
    input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    """The same with steps for each index of an axis."""
    shape = [-1 if one == axis % input.dim() else 1 for one in range(input.dim())]
    return fake_quantize_per_tensor_affine(
        input, scale.view(shape), zero_point.to(input.dtype).view(shape), quant_min, quant_max
    )


def data(tensor: Tensor, *of_class: Any) -> Tensor:
    """Read `.data`, which torch.export treats as a constant."""
    # What is written into the result of `detach` is lost in a part of the program that is under `no_grad`.
    if torch.is_grad_enabled():
        return tensor.detach()
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Set `.data`, which torch.export does not see."""
    if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        raise refusal(
            f"the step sets .data of a tensor to {value.dtype} of shape {tuple(value.shape)}; expected {tensor.dtype} "
            f"of shape {tuple(tensor.shape)}, as it has"
        )
    data(tensor).copy_(value.detach())


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    if input.dim() != indices.dim():
        return torch.take_along_dim(input, indices, dim)
    dim = dim % input.dim()
    # Along an axis PyTorch takes any index modulo the size.
    indices = indices % input.shape[dim]
    shape = _broadcast(input.narrow(dim, 0, 1), indices.narrow(dim, 0, 1))
    sizes = [(*shape[:dim], one.shape[dim], *shape[dim + 1 :]) for one in (input, indices)]
    return input.expand(sizes[0]).gather(dim, indices.expand(sizes[1]))


def _broadcast(one: Tensor, other: Tensor) -> tuple[Any, ...]:
    return tuple(torch.broadcast_shapes(one.shape, other.shape))  # type: ignore[no-untyped-call]


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """The same of rows that values select, of which PyTorch asks whether there are any."""
    if not any(map(private.follows_from_values, (*x1.shape, *x2.shape))):
        return torch.cdist(x1, x2, p, **({} if compute_mode is None else {"compute_mode": compute_mode}))
    return products.cdist(x1, x2, p, 2)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """The same of any number of rows."""
    return F.pdist(input, p) if isinstance(input.shape[0], int) else pairwise_distances(input, p)


def pairwise_distances(input: Tensor, p: float = 2.0) -> Tensor:
    """Return the distances of all pairs of rows of (N, M), whether there are any pairs or not."""
    places = torch.arange(input.shape[0], device=input.device)
    return products.cdist(input, input, p, 2)[places.unsqueeze(1) < places]


def kron(input: Tensor, other: Tensor) -> Tensor:
    rank = max(input.dim(), other.dim())
    a, b = (one.reshape([*[1] * (rank - one.dim()), *one.shape]) for one in (input, other))
    shape = [m * n for m, n in zip(a.shape, b.shape, strict=True)]
    for axis in range(rank):
        a, b = a.unsqueeze(2 * axis + 1), b.unsqueeze(2 * axis)
    return (a * b).reshape(shape)


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Return the covariances of rows without PyTorch's check whether there are enough observations."""
    if not input.is_floating_point():
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    weights = torch.ones_like(rows[0])
    for given in (fweights, aweights):
        weights = weights if given is None else weights * given
    total = weights.sum()
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    centred = rows - (rows * weights).sum(1, keepdim=True) / total
    covariances: Tensor = (centred * weights) @ centred.t() / (total - lost).clamp(min=0.0)
    return covariances.squeeze()


def corrcoef(input: Tensor) -> Tensor:
    if not input.is_floating_point():
        return torch.corrcoef(input)
    covariances = cov(input)
    if covariances.dim() == 0:
        return covariances / covariances
    deviations = covariances.diagonal().sqrt()
    return (covariances / deviations.unsqueeze(1) / deviations).clamp(-1.0, 1.0)


def fill_diagonal_(self: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    if self.dim() != 2 or wrap:
        return self.fill_diagonal_(fill_value, wrap)
    rows, columns = (torch.arange(size, device=self.device) for size in self.shape)
    return self.masked_fill_(rows.unsqueeze(1) == columns, fill_value)


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """The same of what values select, of which PyTorch asks whether there is any: here as there, none is -inf."""
    if not private.follows_from_values(input.numel()):
        return torch.logsumexp(input, dim, keepdim)
    axes = [dim] if isinstance(dim, int) else list(dim)
    largest = input.detach().amax(axes, keepdim=True)
    largest = torch.where(largest.isinf(), 0.0, largest)
    result: Tensor = (input - largest).exp().sum(axes, keepdim=True).log() + largest
    return result if keepdim else result.squeeze(axes)


def linear_cross_entropy(*args: Any, options: Any = None, **settings: Any) -> Tensor:
    """The same without pieces of the batch, which save memory alone, and whose number would be a constant."""
    return F.linear_cross_entropy(*args, **settings)


def resize_(self: Tensor, *sizes: Any, **settings: Any) -> Tensor:
    """Make a tensor of a size, where an empty one is resized, as in `weight.new().resize_(rows, 1)`."""
    if isinstance(self.numel(), torch.SymInt) or self.numel() != 0:
        raise refusal(
            f"the step calls resize_ of a tensor of shape {tuple(self.shape)}; expected torch.empty or tensor.new_empty"
        )
    return self.new_empty(*sizes)


def inverse(input: Tensor) -> Tensor:
    """Invert without the check, which is made when PyTorch runs the step; so do the next three."""
    result: Tensor = torch.linalg.inv_ex(input)[0]
    return result


def cholesky(input: Tensor, *, upper: bool = False) -> Tensor:
    result: Tensor = torch.linalg.cholesky_ex(input, upper=upper)[0]
    return result


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    result: Tensor = torch.linalg.solve_ex(A, B, left=left)[0]
    return result


def lu_factor(A: Tensor, *, pivot: bool = True) -> Any:
    kinds: Any = torch.return_types
    return kinds.linalg_lu_factor(torch.linalg.lu_factor_ex(A, pivot=pivot)[:2])


def least_squares(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Solve by the pseudoinverse; the rank and the singular values, which no gradient reads, are empty."""
    is_vector = B.dim() == A.dim() - 1
    columns = B.unsqueeze(-1) if is_vector else B
    solution = torch.linalg.pinv(A, rtol=rcond) @ columns
    residuals = solution.flatten()[:0]
    if driver not in (None, "gelsy") and A.shape[-2] > A.shape[-1]:
        residuals = (A @ solution - columns).square().sum(-2)
    none = A.new_zeros((0,))
    found = solution.squeeze(-1) if is_vector else solution
    kinds: Any = torch.return_types
    return kinds.linalg_lstsq((found, residuals, none.to(torch.int64), none))


class Range:
    """`range(count)` of a size: as an index, as many places; a loop over it makes a constant of the size.

    It is no sequence, as torch would read its elements.
    """

    def __init__(self, count: Any) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def __reversed__(self) -> Iterator[int]:
        return reversed(range(self._count))

    def places(self) -> Tensor:
        return torch.arange(self._count)


def is_mask(index: Any) -> bool:
    """Whether an index selects where it is true; PyTorch still takes bytes for truth values."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and index.dim() > 0


def indexed(args: tuple[Any, ...], positions: Callable[[Tensor], Sequence[Tensor]]) -> tuple[Any, ...]:
    """Return the arguments of `__getitem__` or `__setitem__` with indices as torch.export and torch.onnx take them.

    Beside other indices in tensors a mask becomes its `positions`. A value is set where a mask of the first axes is
    true, in a view that begins with its axes.
    """
    tensor, index, *values = args
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [one.places() if isinstance(one, Range) else one for one in parts]
    masks = [place for place, one in enumerate(parts) if is_mask(one)]
    if not masks:
        return tensor, tuple(parts) if isinstance(index, tuple) else parts[0], *values
    for place in masks:
        parts[place] = parts[place].bool()
    if any(isinstance(one, (Tensor, list)) for place, one in enumerate(parts) if place != masks[0]):
        found = [positions(index[place]) if place in masks else (one,) for place, one in enumerate(parts)]
        return tensor, tuple(one for several in found for one in several), *values
    (place,), axes = masks, parts[masks[0]].dim()
    if not values or place == 0:
        return tensor, tuple(parts) if isinstance(index, tuple) else parts[0], *values
    mask, parts[place : place + 1] = parts[place], [slice(None)] * axes
    view = tensor[tuple(parts)]
    ahead, behind = (
        [one for one in side if not isinstance(one, (int, torch.SymInt))] for side in (parts[:place], parts[place:])
    )
    first = view.dim() - len(behind) if ... in ahead else len(ahead)
    rest = view.dim() - first - axes
    (value,) = values
    if isinstance(value, Tensor) and value.dim() > rest:
        value = value[(None,) * (first + 1 + rest - value.dim())].movedim(first, 0)
    return view.movedim([*range(first, first + axes)], [*range(axes)]), mask, value


def _of_each(name: str) -> Callable[..., None]:
    """Return what writes into each of several tensors, as `torch._foreach_mul_` does."""

    def write(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        for place, tensor in enumerate(tensors):
            given = [one[place] if isinstance(one, (list, tuple)) else one for one in args]
            getattr(tensor, name)(*given, **kwargs)

    return write


_EACH = "_foreach_"


INSTEAD: Mapping[Any, Callable[..., Any]] = {
    F.grid_sample: grid_sample,
    torch.grid_sampler: grid_sampler,
    F.affine_grid: affine_grid,
    torch.linspace: linspace,
    F.embedding_bag: embedding_bag,
    F.gaussian_nll_loss: gaussian_nll_loss,
    **in_vmap.INSTEAD,
    F.cross_entropy: _of_classes(F.cross_entropy),
    F.nll_loss: nll_loss,
    F.conv_transpose1d: _transposed(F.conv_transpose1d, 1),
    F.conv_transpose2d: _transposed(F.conv_transpose2d, 2),
    F.conv_transpose3d: _transposed(F.conv_transpose3d, 3),
    torch.diagonal: diagonal,
    Tensor.diagonal: diagonal,
    torch.diag: diag,
    Tensor.diag: diag,
    **{function: _transform(function) for function in (torch.fft.fft, torch.fft.ifft, torch.fft.rfft)},
    torch.fft.irfft: irfft,
    torch.fft.irfft2: irfft2,
    torch.fft.irfftn: irfftn,
    torch.take_along_dim: take_along_dim,
    Tensor.take_along_dim: take_along_dim,
    F.one_hot: one_hot,
    torch.bincount: bincount,
    Tensor.bincount: bincount,
    torch.cdist: cdist,
    F.pdist: pdist,
    torch.kron: kron,
    Tensor.kron: kron,
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
    Tensor.fill_diagonal_: fill_diagonal_,
    torch.logsumexp: logsumexp,
    Tensor.logsumexp: logsumexp,
    Tensor.resize_: resize_,
    **({F.linear_cross_entropy: linear_cross_entropy} if hasattr(F, "linear_cross_entropy") else {}),
    torch.linalg.inv: inverse,
    torch.inverse: inverse,
    Tensor.inverse: inverse,
    torch.linalg.cholesky: cholesky,
    torch.linalg.solve: solve,
    torch.linalg.lu_factor: lu_factor,
    torch.linalg.lstsq: least_squares,
    Tensor.data.__get__: data,  # type: ignore[attr-defined]
    Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
    torch.fake_quantize_per_tensor_affine: fake_quantize_per_tensor_affine,
    torch.fake_quantize_per_channel_affine: fake_quantize_per_channel_affine,
    **{
        getattr(torch, name): _of_each(name.removeprefix(_EACH))
        for name in dir(torch)
        if name.startswith(_EACH) and name.endswith("_") and hasattr(Tensor, name.removeprefix(_EACH))
    },
}
"""Function -> the same in operators whose gradients and sizes are known."""
