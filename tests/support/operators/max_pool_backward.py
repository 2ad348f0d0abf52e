"""MaxPoolBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import FLOATS, Changes, Sample, Samples
from operators.ctc_loss import working_type
from operators.strides import repeated, scattered


def max_pool_backward(
    grad_output: Tensor,
    input: Tensor,
    *,
    kernel_size: Sequence[int] = (1,),
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """``aten.max_pool3d_with_indices_backward``, with dimensions of size 1 where there are fewer.

    PyTorch takes the same padding at both ends of a dimension alone, and at most half a window of it. Here it pads by
    itself, with minus infinity; the maxima are taken in float64, which tells all numbers from it.
    """
    spatial = input.dim() - 2
    kernel, steps, spread = (
        list(numbers) * spatial if len(numbers) == 1 else list(numbers) for numbers in (kernel_size, stride, dilation)
    )
    begin, _ = _ends(padding, spatial)
    # As far behind the image as its windows reach.
    pads = [
        number
        for axis in reversed(range(spatial))
        for number in (
            begin[axis],
            (grad_output.shape[axis + 2] - 1) * steps[axis]
            + (kernel[axis] - 1) * spread[axis]
            + 1
            - begin[axis]
            - input.shape[axis + 2],
        )
    ]
    wide = torch.nn.functional.pad(input.double(), pads, value=-torch.inf)
    missing = (1,) * (3 - spatial)
    image = wide.reshape(*wide.shape[:2], *missing, *wide.shape[2:])
    ones = [1] * (3 - spatial)
    lists: list[Any] = [[*ones, *kernel], [*ones, *steps], 0, [*ones, *spread]]
    if 0 in image.shape:
        return torch.zeros(input.shape, dtype=dtype)
    _, found = torch.nn.functional.max_pool3d(image, *lists, return_indices=True)
    grad = grad_output.to(working_type(dtype)).reshape(found.shape).contiguous()
    sums = torch.ops.aten.max_pool3d_with_indices_backward(
        grad, image.to(grad.dtype), lists[0], lists[1], [0] * 3, lists[3], False, found
    )
    result: Tensor = torch.nn.functional.pad(sums.reshape(wide.shape), [-number for number in pads])
    return result.to(dtype)


def _ends(padding: Sequence[int], spatial: int) -> tuple[list[int], list[int]]:
    if len(padding) == 2 * spatial:
        return list(padding[:spatial]), list(padding[spatial:])
    both = list(padding) * spatial if len(padding) == 1 else list(padding)
    return both, both


def arguments(
    batch: int, channels: int, sizes: Sequence[int], attributes: Mapping[str, Any], dtype: torch.dtype, seed: int = 0
) -> Sample:
    """Tensors that fit attributes. About half of the input's elements have another's value."""
    generator = torch.Generator().manual_seed(seed)
    input = torch.randn((batch, channels, *sizes), generator=generator)
    ties = torch.randint(-2, 3, input.shape, generator=generator) / 2
    input = torch.where(torch.rand(input.shape, generator=generator) < 0.5, ties, input).to(dtype)
    grad = torch.randn((batch, channels, *places(sizes, attributes)), generator=generator).to(dtype)
    return sample_of(grad, input, attributes)


def sample_of(grad: Tensor, input: Tensor, attributes: Mapping[str, Any]) -> Sample:
    """Where a sum cancels, what is added up bounds what can be asked for."""
    return Sample([grad, input], attributes, max_pool_backward(grad.abs(), input, **attributes))


def places(sizes: Sequence[int], attributes: Mapping[str, Any]) -> list[int]:
    """How many windows PyTorch gives along each dimension."""
    spatial = len(sizes)
    found = []
    begin, end = _ends(attributes.get("padding", (0,)), spatial)
    for axis, size in enumerate(sizes):
        kernel, stride, dilation = (
            attributes.get(name, (1,))[axis if len(attributes.get(name, (1,))) > 1 else 0]
            for name in ("kernel_size", "stride", "dilation")
        )
        room = size + begin[axis] + end[axis] - dilation * (kernel - 1) - 1
        count = (-(-room // stride) if attributes.get("ceil_mode") else room // stride) + 1
        if attributes.get("ceil_mode") and (count - 1) * stride >= size + begin[axis]:
            count -= 1
        found.append(count)
    return found


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    spatial = rng.randint(1, 3)
    kernel = [rng.randint(1, 3) for _ in range(spatial)]
    attributes = {
        "kernel_size": tuple(kernel),
        "stride": tuple(rng.randint(1, 3) for _ in range(spatial)),
        "padding": tuple(rng.randint(0, (size - 1) // 2) for size in kernel),
        "dilation": (rng.randint(1, 2),),
        "ceil_mode": rng.randint(0, 1),
    }
    sizes = [rng.randint(5, 7) for _ in range(spatial)]
    sample = arguments(rng.randint(1, 3), rng.randint(1, 3), sizes, attributes, dtype, rng.randint(0, 2**30))
    grad, input = (tensor for tensor in sample.inputs if tensor is not None)
    return sample_of(repeated(grad, rng), scattered(input, rng), attributes)


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments(2, 3, (size, size + 1), {"kernel_size": (3,), "stride": (2,), "padding": (1,)}, dtype)


def _typical(dtype: torch.dtype) -> list[Sample]:
    halves = {"kernel_size": (2,), "stride": (2,)}
    return [
        arguments(3, 4, (8, 40), halves, dtype),
        arguments(3, 4, (9, 7), {**halves, "ceil_mode": 1}, dtype),
        arguments(2, 3, (11, 70), {"kernel_size": (3,), "stride": (2,), "padding": (1,)}, dtype),
        arguments(2, 3, (9, 40), {"kernel_size": (3, 2), "padding": (0, 1, 2, 0), "dilation": (2, 1)}, dtype),
        arguments(2, 3, (12, 50), {"kernel_size": (4, 5), "stride": (3, 4), "ceil_mode": 1}, dtype),
        arguments(2, 3, (70,), {"kernel_size": (5,), "stride": (2,), "padding": (2,)}, dtype),
        arguments(2, 2, (4, 5, 36), {"kernel_size": (2, 3, 3), "stride": (1, 2, 1), "padding": (1, 0, 1)}, dtype),
        arguments(1, 2, (2, 3), {"kernel_size": (2,), "stride": (3,), "padding": (1,), "dilation": (3,)}, dtype),
    ]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    width = max(1, length)
    return [
        arguments(2, 2, (3, width), {"kernel_size": (2, 1), "stride": (1, 2)}, dtype),
        arguments(2, 2, (3, width), {"kernel_size": (3,), "padding": (1,)}, dtype),
        arguments(1, 2, (3, width), {"kernel_size": (3,), "stride": (2,), "padding": (1,)}, dtype),
        arguments(1, 2, (2, width), {"kernel_size": (2,), "stride": (2,), "ceil_mode": 1}, dtype),
        arguments(1, 2, (2, width), {"kernel_size": (1, 3), "stride": (1, 3), "padding": (0, 1)}, dtype),
    ]


def _valid() -> Sample:
    return arguments(2, 3, (5, 5), {"kernel_size": (3,), "stride": (2,)}, torch.float32)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1)
    for index in range(2):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    yield from near.all_retyped(range(2), torch.int32, torch.bool)
    yield from near.reshaped(0, (2, 3, 2), (2, 3, 2, 3), (2, 3, 3, 3), (2, 2, 2, 2), (1, 3, 2, 2), (), (1,) * 9)
    yield from near.reshaped(1, (2, 3, 5), (2, 3, 5, 7), (2, 3, 2, 5), (2, 4, 5, 5), (0, 3, 5, 5), (2, 3), (1,) * 9)
    for name in ("kernel_size", "stride", "dilation"):
        yield from near.with_attributes(name, (0,), (-1, 1), (1, 1, 1), (2**40,))
    yield from near.with_attributes("kernel_size", (1,), (6,), (3, 1))
    yield from near.with_attributes("stride", (1,), (3,), (2, 1))
    yield from near.with_attributes("padding", (-1,), (1,), (0, 0, 0), (1, 1, 1, 1), (3,), (2**62,))
    yield from near.with_attributes("dilation", (2,), (3,))


SAMPLES = Samples(
    oracle=max_pool_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    dtypes=(*FLOATS, torch.float64),
    typical=_typical,
    rows=_rows,
    empty=[
        (
            Sample([torch.zeros(0, 3, 2, 2), torch.zeros(0, 3, 4, 4)], {"kernel_size": (2,), "stride": (2,)}),
            [(0, 3, 4, 4)],
        ),
        (Sample([torch.zeros(2, 0, 3), torch.zeros(2, 0, 4)], {"kernel_size": (2,)}), [(2, 0, 4)]),
    ],
)
