"""ConvolutionBackward: PyTorch's answer, and arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from operators.base import FLOATS, Changes, Sample, Samples, activation_type
from operators.ctc_loss import working_type
from operators.strides import repeated, scattered


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    *,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    output_mask: Sequence[bool] = (True, True, True),
    factors_in_bfloat16: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten.convolution_backward``; what is not wanted is of shape (0).

    ATen has no padding that differs at both ends of a dimension: there the input is padded first, and its gradient cut;
    of a transposed convolution grad_output is padded, as what was cut off has no gradient.
    """
    spatial = input.dim() - 2
    work = working_type(dtype)
    # Contiguous, as PyTorch refuses some strides of float64.
    factors = [one.bfloat16() if factors_in_bfloat16 else one for one in (grad_output, input, weight)]
    wide = [tensor.to(work).contiguous() for tensor in factors]
    lists = [list(numbers) * spatial if len(numbers) == 1 else list(numbers) for numbers in (stride, dilation)]
    extra = list(output_padding) * spatial if len(output_padding) == 1 else list(output_padding)
    begin, end = (list(padding) * spatial,) * 2 if len(padding) == 1 else (list(padding),) * 2
    if len(padding) == 2 * spatial:
        begin, end = list(padding[:spatial]), list(padding[spatial:])
    pads = [number for pair in zip(reversed(begin), reversed(end), strict=True) for number in pair]
    padded = 0 if transposed else 1
    none = [0] * spatial
    if begin == end:
        arguments: list[Any] = [begin, lists[1], transposed, extra if transposed else none]
    else:
        wide[padded] = torch.nn.functional.pad(wide[padded], pads)
        arguments = [none, lists[1], transposed, extra if transposed else none]
    if 0 in grad_output.shape or 0 in input.shape:
        # PyTorch refuses some of these.
        grads: list[Tensor | None] = [
            torch.zeros_like(input),
            torch.zeros_like(weight),
            torch.zeros(grad_output.shape[1]),
        ]
    else:
        grads = torch.ops.aten.convolution_backward(
            *wide, [wide[0].shape[1]], lists[0], *arguments, groups, list(map(bool, output_mask))
        )
    if begin != end and not transposed and grads[0] is not None:
        for axis in range(spatial):
            grads = [grads[0].narrow(axis + 2, begin[axis], input.shape[axis + 2]), *grads[1:]]
    if grads[2] is not None:
        # What is not multiplied is not rounded.
        grads = [*grads[:2], grad_output.to(work).sum([0, *range(2, grad_output.dim())])]
    types = (activation_type(input, dtype), dtype, dtype)
    first, second, third = (
        torch.zeros(0, dtype=type_) if grad is None or not wanted else grad.to(type_)
        for grad, wanted, type_ in zip(grads, output_mask, types, strict=True)
    )
    return first, second, third


def arguments(
    described: Sequence[Any],
    attributes: Mapping[str, Any],
    dtype: torch.dtype,
    seed: int = 0,
    *,
    activations: torch.dtype | None = None,
) -> Sample:
    """Tensors that fit attributes: `described` are batch, channels of input and output, sizes of input and kernel."""
    batch, channels, sizes, kernel = described
    generator = torch.Generator().manual_seed(seed)
    spatial = len(sizes)
    groups, transposed = attributes.get("groups", 1), attributes.get("transposed", 0)
    of = {
        name: list(attributes.get(name, (default,))) * (spatial if len(attributes.get(name, (0,))) == 1 else 1)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0))
    }
    outputs = []
    for axis, (size, taps) in enumerate(zip(sizes, kernel, strict=True)):
        pads = of["padding"][axis] + of["padding"][axis if len(of["padding"]) == spatial else spatial + axis]
        reach = of["dilation"][axis] * (taps - 1) + 1
        if transposed:
            outputs.append((size - 1) * of["stride"][axis] - pads + reach + of["output_padding"][axis])
        else:
            outputs.append((size + pads - reach) // of["stride"][axis] + 1)
    ends = channels if transposed else channels[::-1]
    shapes = [(batch, channels[1], *outputs), (batch, channels[0], *sizes), (ends[0], ends[1] // groups, *kernel)]
    types = (activations or dtype, activations or dtype, dtype)
    tensors = [torch.randn(shape, generator=generator).to(type_) for shape, type_ in zip(shapes, types, strict=True)]
    return Sample(tensors, attributes, _terms(tensors, attributes))


def _terms(tensors: Sequence[Tensor], attributes: Mapping[str, Any]) -> float:
    """The largest sum of magnitudes that any result adds up."""
    sums = convolution_backward(*(tensor.double().abs() for tensor in tensors), **attributes)
    return max((float(one.max()) for one in sums if one.numel()), default=0.0)


def _strided(rng: random.Random, dtype: torch.dtype) -> Sample:
    spatial = rng.randint(1, 3)
    groups = rng.randint(1, 2)
    transposed = rng.randint(0, 1)
    attributes = {
        "stride": tuple(rng.randint(1, 3) for _ in range(spatial)),
        "padding": tuple(rng.randint(0, 1) for _ in range(rng.choice([1, spatial, 2 * spatial]))),
        "dilation": (rng.randint(1, 2),),
        "transposed": transposed,
        "groups": groups,
        "factors_in_bfloat16": int(dtype != torch.float64 and rng.randint(0, 1)),
    }
    sizes = [rng.randint(5, 7) for _ in range(spatial)]
    kernel = [rng.randint(1, 3) for _ in range(spatial)]
    channels = (groups * rng.randint(1, 3), groups * rng.randint(1, 3))
    mixed = torch.bfloat16 if dtype != torch.float64 and rng.random() < 0.5 else dtype
    described = (rng.randint(1, 3), channels, sizes, kernel)
    sample = arguments(described, attributes, dtype, rng.randint(0, 2**30), activations=mixed)
    grad, input, weight = (tensor for tensor in sample.inputs if tensor is not None)
    views = [repeated(grad, rng), scattered(input, rng), scattered(weight, rng)]
    return Sample(views, attributes, _terms(views, attributes))


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return arguments((2, (3, 5), (size, size + 1), (3, 3)), {"padding": (1, 1)}, dtype)


def _typical(dtype: torch.dtype) -> list[Sample]:
    narrow = {"factors_in_bfloat16": int(dtype != torch.float64)}
    mixed = dtype if dtype == torch.float64 else torch.bfloat16
    return [
        arguments((3, (4, 6), (9, 7), (3, 3)), {"padding": (1, 1)}, dtype),
        arguments((2, (4, 6), (9, 8), (3, 2)), {"stride": (2, 3), "dilation": (2, 1), "groups": 2}, dtype),
        arguments((2, (6, 6), (9, 8), (3, 3)), {"padding": (0, 1, 2, 0), "groups": 6}, dtype),
        arguments((2, (6, 6), (12, 13), (3, 3)), {"padding": (1,), "stride": (2,), "groups": 6}, dtype),
        arguments((2, (8, 5), (6, 7), (1, 1)), {}, dtype),
        arguments((2, (8, 5), (7, 7), (1, 1)), {"stride": (2,), "output_mask": (0, 1, 0)}, dtype),
        arguments((2, (3, 4), (12,), (5,)), {"padding": (2,), "stride": (2,), "output_mask": (1, 0, 1)}, dtype),
        arguments((2, (3, 4), (4, 5, 6), (2, 3, 3)), {"padding": (1, 0, 1), "stride": (1, 2, 1)}, dtype),
        # Pairs of channels and items of float32 and of 16 bits: odd ones are left over, as planes, windows, items, and
        # none.
        arguments((3, (5, 7), (9, 7), (3, 3)), {"padding": (1,), **narrow}, dtype),
        arguments((3, (35, 71), (7, 7), (1, 1)), narrow, dtype),
        arguments((2, (3, 130), (7, 8), (3, 3)), {"padding": (1,), "stride": (2,), **narrow}, dtype),
        arguments((17, (20, 24), (5, 4), (3, 3)), {"padding": (1,), **narrow}, dtype),
        arguments((1, (20, 24), (5, 4), (3, 3)), {"padding": (1,), **narrow}, dtype),
        arguments((9, (6, 6), (5, 4), (3, 3)), {"padding": (1,), "groups": 6, **narrow}, dtype),
        arguments((3, (5, 6), (9, 7), (3, 3)), {"padding": (1,), **narrow}, dtype, activations=mixed),
        arguments((3, (4, 6), (9, 7), (3, 3)), {"padding": (1,)}, dtype, activations=mixed),
        arguments((3, (7, 6), (5, 4), (3, 3)), {"transposed": 1, "stride": (2,), "padding": (1,), **narrow}, dtype),
        arguments((2, (4, 6), (5, 4), (3, 3)), {"transposed": 1, "stride": (2,), "padding": (1,), "groups": 2}, dtype),
        arguments(
            (2, (4, 3), (5, 4), (3, 2)),
            {"transposed": 1, "stride": (3, 2), "padding": (1, 0, 0, 1), "output_padding": (2, 1)}, dtype,
        ),
    ]  # fmt: skip


def _parts(dtype: torch.dtype) -> list[Sample]:
    """Numbers that are converted are in memory for a part of the batch at a time."""
    if dtype == torch.float64:
        return []
    attributes = {"stride": (2,), "factors_in_bfloat16": 1}
    return [arguments((5, (8, 16), (256, 250), (3, 3)), attributes, dtype, activations=torch.bfloat16)]


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    width = max(1, length)
    return [
        arguments((2, (3, 5), (3, width), (3, 3)), {"padding": (1,)}, dtype),
        arguments((1, (2, 2), (3, width), (3, 3)), {"padding": (1,), "groups": 2}, dtype),
        arguments((2, (3, 5), (2, width), (1, 1)), {}, dtype),
        arguments((1, (2, 4), (3, width), (3, 3)), {"padding": (1,), "stride": (2,)}, dtype),
    ]


def _valid() -> Sample:
    return arguments((2, (4, 6), (5, 5), (3, 3)), {}, torch.float32)


def _invalid() -> Iterator[Sample]:
    near = Changes(_valid)
    yield from near.without(0, 1, 2)
    for index in range(3):
        yield from near.retyped(index, torch.float16, torch.float64, torch.int64, torch.bool)
    yield from near.reshaped(0, (2, 6, 3), (2, 6, 3, 4), (2, 5, 3, 3), (3, 6, 3, 3), (), (1,) * 9)
    yield from near.reshaped(1, (2, 4, 5), (2, 4, 5, 6), (2, 3, 5, 5), (0, 4, 5, 5), (2, 4), (1,) * 9)
    yield from near.reshaped(2, (6, 4, 3), (6, 4, 3, 2), (6, 5, 3, 3), (5, 4, 3, 3), (6, 4, 0, 3), (1,) * 9)
    yield from near.all_retyped(range(3), torch.int32, torch.bool)
    for name in ("stride", "dilation"):
        yield from near.with_attributes(name, (0,), (-1, 1), (1, 1, 1), (2,), (2**40,))
    yield from near.with_attributes("padding", (-1,), (1,), (0, 0, 0), (0, 0, 1, 0), (2**62,))
    yield from near.with_attributes("output_padding", (1,), (-1,), (0, 0, 0))
    yield from near.with_attributes("groups", 0, -1, 2, 3, 2**40)
    yield from near.with_attributes("output_mask", (1, 1), (1, 1, 2), (1, 1, 1, 1))


SAMPLES = Samples(
    oracle=convolution_backward,
    strided=_strided,
    sized=_sized,
    valid=_valid,
    invalid=_invalid,
    dtypes=(*FLOATS, torch.float64),
    typical=_typical,
    parts=_parts,
    rows=_rows,
    empty=[
        (
            Sample([torch.zeros(0, 3, 4, 4), torch.zeros(0, 2, 4, 4), torch.ones(3, 2, 1, 1)]),
            [(0, 2, 4, 4), (3, 2, 1, 1), (3,)],
        ),
    ],
)
