"""Pooling whose traced program holds for dynamic sizes.

PyTorch traces `max_pool1d` for one length. With `ceil_mode` it drops a last window that would begin behind the input
and its padding: whether there is one depends on the sizes, and PyTorch takes what holds for those of the example. The
windows of adaptive average pooling follow from the sizes; here a product with a matrix adds up what is in each. A
window as long as its axis, `F.max_pool1d(x, x.shape[2])`, would have the length of the example.

This module imports torch.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private

_AXES = {
    F.max_pool1d: 1,
    F.max_pool2d: 2,
    F.max_pool3d: 3,
    torch.max_pool1d: 1,
    torch.max_pool2d: 2,
    torch.max_pool3d: 3,
}
_AVERAGES = {torch.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3}
_ADAPTIVE = {
    F.adaptive_avg_pool1d: 1,
    F.adaptive_avg_pool2d: 2,
    F.adaptive_avg_pool3d: 3,
    torch.adaptive_avg_pool1d: 1,
}
_SETTINGS = 6
"""The arguments ahead of `return_indices`."""
_POOLS = {2: torch.max_pool2d, 3: torch.max_pool3d}


@contextlib.contextmanager
def sized() -> Iterator[None]:
    """Let pooling under this be traced for any sizes."""
    with _Sized():
        yield


class _Sized(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AXES or func in _AVERAGES:
            pooled = _over_whole_axes(func, args, kwargs or {})
            if pooled is not None:
                return pooled
        settings = dict(kwargs or {})
        if func in _AXES and 0 < len(args) <= _SETTINGS and not settings.pop("return_indices", False):
            axes = _AXES[func]
            if not all(isinstance(size, int) for size in args[0].shape[-axes:]):
                return pool(axes, *args, **settings)
        if func in _ADAPTIVE:
            given = inspect.signature(_given_adaptive).bind(*args, **(kwargs or {})).arguments
            return _adaptive(func, _ADAPTIVE[func], **given)
        if func is F.interpolate:
            bound = inspect.signature(F.interpolate).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            if bound.arguments["mode"] == "area":
                return _area(func, bound)
        return func(*args, **(kwargs or {}))


def _given_maximum(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> None:
    """Has the arguments of maximum pooling."""


def _given_average(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> None:
    """Has the arguments of average pooling."""


def _over_whole_axes(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Pool where windows are as long as their axes; None: where another window follows from a size, or none does."""
    windows = args[1] if len(args) > 1 else kwargs.get("kernel_size")
    if not any(isinstance(one, torch.SymInt) for one in (windows if isinstance(windows, (list, tuple)) else [windows])):
        return None
    is_average = func in _AVERAGES
    bound = inspect.signature(_given_average if is_average else _given_maximum).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    axes, input = (_AVERAGES if is_average else _AXES)[func], given["input"]
    kernel = _per_axis(given["kernel_size"], axes)
    paddings, dilations = _per_axis(given["padding"], axes), _per_axis(given.get("dilation", 1), axes)
    strides = _strides(given["stride"], kernel)
    whole = [
        private.known_true(window == size) and padding == 0 and dilation == 1
        for window, size, padding, dilation in zip(kernel, input.shape[-axes:], paddings, dilations, strict=True)
    ]
    follows = any(not isinstance(window, int) for window, covers in zip(kernel, whole, strict=True) if not covers)
    if follows or given.get("return_indices") or given.get("divisor_override") is not None:
        return None
    # Of equal numbers the first gets the gradient: that with the least index of the first axis, then of the next one.
    for axis in reversed(range(axes)):
        if whole[axis]:
            along = axis - axes
            input = input.mean(along, keepdim=True) if is_average else input.max(along, keepdim=True).values
        else:
            window, step, pad, space = (
                [one[axis] if k == axis else rest for k in range(axes)]
                for one, rest in ((kernel, 1), (strides, 1), (paddings, 0), (dilations, 1))
            )
            if is_average:
                input = func(input, window, step, pad, given["ceil_mode"], given["count_include_pad"])
            else:
                input = pool(axes, input, window, step, pad, space, given["ceil_mode"])
    pooled: Tensor = input
    return pooled


def _given_adaptive(input: Tensor, output_size: Any) -> None:
    """Has the arguments of adaptive pooling."""


def _area(func: Any, bound: inspect.BoundArguments) -> Any:
    """Interpolate by areas, which is adaptive average pooling."""
    input, size, factors = (bound.arguments[name] for name in ("input", "size", "scale_factor"))
    axes = input.dim() - 2
    if size is None and isinstance(factors, (int, float)):
        factors = [factors] * axes
    if size is None and isinstance(factors, (list, tuple)):
        size = [math.floor(one * factor) for one, factor in zip(input.shape[2:], factors, strict=True)]
    return _adaptive(lambda *_: func(*bound.args, **bound.kwargs), axes, input, size)


def _adaptive(func: Any, axes: int, input: Tensor, output_size: Any) -> Any:
    sizes = list(output_size) if isinstance(output_size, (list, tuple)) else [output_size] * axes
    pairs = list(zip(input.shape[-axes:], sizes, strict=False))
    fixed = all(isinstance(size, int) for size in input.shape[-axes:])
    if fixed or len(sizes) != axes or all(isinstance(count, int) and count == 1 for count in sizes):
        return func(input, output_size)
    for axis, (size, count) in enumerate(pairs, -axes):
        if count is not None and count is not size:
            input = averaged(input, axis, size, count)
    return input


def averaged(input: Tensor, axis: int, size: Any, count: Any) -> Tensor:
    """Return means along an axis, of windows from i size // count to ceil((i + 1) size / count)."""
    windows = torch.arange(count, device=input.device)
    begins, ends = windows * size // count, ((windows + 1) * size + count - 1) // count
    places = torch.arange(size, device=input.device)[:, None]
    within = ((places >= begins) & (places < ends)).to(input.dtype)
    sums: Tensor = input.transpose(axis, -1) @ within
    means: Tensor = sums / (ends - begins).to(input.dtype)
    return means.transpose(axis, -1)


def pool(
    axes: int,
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Maximum pooling over the last axes, as PyTorch's `max_pool1d`, 2d and 3d, in steps whose sizes are formulas."""
    kernel = _per_axis(kernel_size, axes)
    strides = _strides(stride, kernel)
    paddings, dilations = _per_axis(padding, axes), _per_axis(dilation, axes)
    widths = [dilation * (size - 1) + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    legal = all(0 <= 2 * pad <= size for pad, size in zip(paddings, kernel, strict=True))
    late = [step + pad > width for step, pad, width in zip(strides, paddings, widths, strict=True)]
    if ceil_mode and any(late) and legal and input.is_floating_point():
        # The windows that count are those of a wider border on the right without `ceil_mode`. On an axis where none can
        # begin behind the input these are ceil((n + 2 pad - width) / step) + 1, elsewhere ceil((n + pad) / step).
        wider = [
            width - 1 - pad if begins_late else step - 1
            for width, pad, step, begins_late in zip(widths, paddings, strides, late, strict=True)
        ]
        if any(wider):
            input = F.pad(input, [end for width in reversed(wider) for end in (0, width)], value=-math.inf)
        ceil_mode = False
    if axes > 1:
        return _POOLS[axes](input, kernel, strides, paddings, dilations, ceil_mode)
    row = torch.max_pool2d(input.unsqueeze(-2), [1, *kernel], [1, *strides], [0, *paddings], [1, *dilations], ceil_mode)
    return row.squeeze(-2)


def _strides(stride: Any, kernel: list[int]) -> list[int]:
    # A list without elements is no stride as well.
    is_given = stride is not None and not (isinstance(stride, (list, tuple)) and not stride)
    return _per_axis(stride, len(kernel)) if is_given else kernel


def _per_axis(value: int | Sequence[int], axes: int) -> list[int]:
    values = [value] if isinstance(value, int | torch.SymInt) else list(value)
    return values * axes if len(values) == 1 else values
