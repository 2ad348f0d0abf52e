"""Convolution: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import FLOATS, Changes, Sample, Samples, activation_type
from operators.ctc_loss import working_type
from operators.strides import scattered


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    relu: bool = False,
    factors_in_bfloat16: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """``aten.convolution``, and a ReLU.

    ATen has no padding that differs at both ends of a dimension: there the input is padded first, or the result of a
    transposed convolution cut.
    """
    spatial = input.dim() - 2
    work = working_type(dtype)
    factors = [one.bfloat16() if factors_in_bfloat16 else one for one in (input, weight)]
    x, w = (tensor.to(work).contiguous() for tensor in factors)
    b = None if bias is None else bias.to(work).contiguous()

    def per_axis(numbers: Sequence[int]) -> list[int]:
        return list(numbers) * spatial if len(numbers) == 1 else list(numbers)

    ends = list(padding) if len(padding) == 2 * spatial else per_axis(padding) * 2
    begin, end = ends[:spatial], ends[spatial:]
    own = [0] * spatial
    if begin == end:
        own = begin
    elif not transposed:
        x = torch.nn.functional.pad(x, [n for pair in zip(reversed(begin), reversed(end), strict=True) for n in pair])
    result: Tensor = torch.ops.aten.convolution(
        x, w, b, per_axis(stride), own, per_axis(dilation), bool(transposed), per_axis(output_padding), groups
    )
    if begin != end and transposed:
        for axis in range(spatial):
            size = result.shape[axis + 2] - begin[axis] - end[axis]
            result = result.narrow(axis + 2, begin[axis], size)
    return (result.relu() if relu else result).to(activation_type(input, dtype))


def arguments(
    described: Sequence[Any],
    attributes: Mapping[str, Any],
    dtype: torch.dtype,
    seed: int = 0,
    *,
    biased: bool = True,
    activations: torch.dtype | None = None,
) -> Sample:
    """Tensors that fit attributes: `described` are batch, channels of input and output, sizes of input and kernel."""
    batch, channels, sizes, kernel = described
    generator = torch.Generator().manual_seed(seed)
    ends = channels if attributes.get("transposed", 0) else channels[::-1]
    shapes = [(batch, channels[0], *sizes), (ends[0], ends[1] // attributes.get("groups", 1), *kernel), (channels[1],)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes[: 2 + biased]]
    tensors[0] = tensors[0].to(activations or dtype)
    return Sample(tensors, attributes, _terms(tensors, attributes))


def _terms(tensors: Sequence[Tensor], attributes: Mapping[str, Any]) -> float:
    """The largest sum of magnitudes that any result adds up."""
    sums = convolution(*(tensor.double().abs() for tensor in tensors), **attributes)
    return float(sums.max()) if sums.numel() else 0.0


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    spatial = rng.randint(1, 3)
    groups = rng.randint(1, 2)
    attributes = {
        "stride": tuple(rng.randint(1, 3) for _ in range(spatial)),
        "padding": tuple(rng.randint(0, 1) for _ in range(rng.choice([1, spatial, 2 * spatial]))),
        "dilation": (rng.randint(1, 2),),
        "transposed": rng.randint(0, 1),
        "groups": groups,
        "relu": rng.randint(0, 1),
        "factors_in_bfloat16": int(dtype != torch.float64 and rng.randint(0, 1)),
    }
    sizes = [rng.randint(5, 7) for _ in range(spatial)]
    kernel = [rng.randint(1, 3) for _ in range(spatial)]
    channels = (groups * rng.randint(1, 3), groups * rng.randint(1, 3))
    described = (rng.randint(1, 3), channels, sizes, kernel)
    mixed = torch.bfloat16 if dtype != torch.float64 and rng.random() < 0.5 else dtype
    sample = arguments(
        described, attributes, dtype, rng.randint(0, 2**30), biased=rng.random() < 0.5, activations=mixed
    )
    views = [scattered(tensor, rng) for tensor in sample.inputs if tensor is not None]
    return Sample(views, attributes, _terms(views, attributes))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments((2, (3, 5), (size, size + 1), (3, 3)), {"padding": (1, 1)}, dtype)


def _typical(dtype: torch.dtype) -> list[Sample]:
    narrow = {"factors_in_bfloat16": int(dtype != torch.float64)}
    mixed = dtype if dtype == torch.float64 else torch.bfloat16
    return [
        arguments((3, (4, 6), (9, 7), (3, 3)), {"padding": (1, 1), "relu": 1}, dtype),
        arguments((2, (4, 6), (9, 8), (3, 2)), {"stride": (2, 3), "dilation": (2, 1), "groups": 2}, dtype),
        arguments((2, (6, 6), (9, 8), (3, 3)), {"padding": (0, 1, 2, 0), "groups": 6}, dtype, biased=False),
        arguments((2, (6, 6), (12, 13), (3, 3)), {"padding": (1,), "stride": (2,), "groups": 6}, dtype),
        arguments((2, (8, 5), (6, 7), (1, 1)), {}, dtype),
        arguments((2, (3, 130), (7, 7), (3, 3)), {"padding": (1,), "relu": 1}, dtype),
        arguments((2, (3, 131), (12, 11), (3, 3)), {"padding": (1,), "stride": (2,)}, dtype),
        arguments((2, (3, 4), (12,), (5,)), {"padding": (2,), "stride": (2,)}, dtype, biased=False),
        # Pairs of channels of float32 and of 16 bits: an odd one is left over, as rows, panels, items, and none.
        arguments((3, (5, 6), (9, 7), (3, 3)), {"padding": (1,), "relu": 1, **narrow}, dtype),
        arguments((2, (35, 130), (7, 7), (1, 1)), narrow, dtype),
        arguments((2, (3, 131), (12, 11), (3, 3)), {"padding": (1,), "stride": (2,), **narrow}, dtype),
        arguments((9, (20, 24), (5, 4), (3, 3)), {"padding": (1,), **narrow}, dtype),
        arguments((9, (6, 6), (5, 4), (3, 3)), {"padding": (1,), "groups": 6, **narrow}, dtype),
        arguments((3, (5, 6), (9, 7), (3, 3)), {"padding": (1,), "relu": 1, **narrow}, dtype, activations=mixed),
        arguments((2, (4, 6), (9, 7), (3, 3)), {"padding": (1,)}, dtype, activations=mixed),
        arguments((2, (7, 6), (5, 4), (3, 3)), {"transposed": 1, "stride": (2,), "padding": (1,), **narrow}, dtype),
        arguments((2, (70, 6), (3, 4), (3, 3)), {"transposed": 1, "stride": (2,), "relu": 1, **narrow}, dtype),
        arguments((9, (20, 24), (4, 3), (3, 3)), {"transposed": 1, "padding": (1,), **narrow}, dtype),
        arguments((2, (3, 4), (4, 5, 6), (2, 3, 3)), {"padding": (1, 0, 1), "stride": (1, 2, 1)}, dtype),
        arguments((2, (4, 6), (5, 4), (3, 3)), {"transposed": 1, "stride": (2,), "padding": (1,), "groups": 2}, dtype),
        arguments(
            (2, (4, 3), (5, 4), (3, 2)),
            {"transposed": 1, "stride": (3, 2), "padding": (1, 0, 0, 1), "output_padding": (2, 1), "relu": 1}, dtype,
        ),
    ]  # fmt: skip


def _parts(dtype: torch.dtype) -> list[Sample]:
    """Numbers that are converted are in memory for a part of the batch at a time."""
    if dtype == torch.float64:
        return []
    attributes = {"stride": (2,), "factors_in_bfloat16": 1}
    return [arguments((3, (8, 16), (256, 250), (3, 3)), attributes, dtype, activations=torch.bfloat16)]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    width = max(1, length)
    return [
        arguments((2, (3, 5), (3, width), (3, 3)), {"padding": (1,)}, dtype),
        arguments((1, (2, 2), (3, width), (3, 3)), {"padding": (1,), "groups": 2, "relu": 1}, dtype),
        arguments((2, (3, 5), (2, width), (1, 1)), {}, dtype),
        arguments((1, (2, 4), (3, width), (3, 3)), {"padding": (1,), "stride": (2,)}, dtype),
        arguments((1, (2, 129), (3, width), (3, 3)), {"padding": (1,)}, dtype),
    ]


def _valid() -> Sample:
    return arguments((2, (4, 6), (5, 5), (3, 3)), {}, torch.float32)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1)
    for index in range(3):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    yield from near.reshaped(0, (2, 4, 5), (2, 4, 5, 6, 7), (2, 3, 5, 5), (2, 4, 2, 5), (2, 4), (), (1,) * 9)
    yield from near.reshaped(1, (6, 4, 3), (6, 4, 3, 2, 1), (6, 5, 3, 3), (5, 4, 3, 3), (6, 4, 0, 3), (1,) * 9)
    yield from near.reshaped(2, (5,), (), (6, 1), (1,), (0,))
    yield from near.all_retyped(range(3), torch.int32, torch.bool)
    for name in ("stride", "dilation"):
        yield from near.with_attributes(name, (0,), (-1, 1), (1, 1, 1), (2**40,))
    yield from near.with_attributes("dilation", (3,), (1, 3))
    yield from near.with_attributes("padding", (-1,), (0, 0, 0), (2**62,))
    yield from near.with_attributes("output_padding", (1,), (-1,), (0, 0, 0))
    yield from near.with_attributes("groups", 0, -1, 2, 3, 2**40)


SAMPLES = Samples(
    oracle=convolution,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    dtypes=(*FLOATS, torch.float64),
    typical=_typical,
    parts=_parts,
    rows=_rows,
    empty=[
        (Sample([torch.zeros(0, 2, 4, 4), torch.ones(3, 2, 1, 1)]), [(0, 3, 4, 4)]),
        (Sample([torch.zeros(2, 2, 4, 4), torch.ones(0, 2, 1, 1)]), [(2, 0, 4, 4)]),
    ],
)
