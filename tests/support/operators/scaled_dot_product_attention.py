"""ScaledDotProductAttention: PyTorch's answer, and arguments."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from operators import attention
from operators.base import FLOATS, Changes, Sample, Samples


def _sized(size: int, dtype: torch.dtype) -> Sample:
    return attention.arguments((1, 2, 1, size, size + 1, 5, 6), dtype, causal=2)


def _rows(length: int, dtype: torch.dtype) -> list[Sample]:
    width = max(1, length)
    return [
        attention.arguments((1, 1, 1, 3, width, 5, 4), dtype),
        attention.arguments((1, 1, 1, 3, 4, width, 5), dtype),
        attention.arguments((1, 1, 1, 3, 4, 5, width), dtype, mask="added"),
    ]


def _invalid() -> Iterator[Sample]:
    yield from attention.invalid(Changes(attention.valid), 0)


SAMPLES = Samples(
    oracle=attention.forward,
    strided=attention.strided,
    sized=_sized,
    valid=attention.valid,
    invalid=_invalid,
    dtypes=(*FLOATS, torch.float64),
    typical=attention.typical,
    rows=_rows,
    empty=[
        (attention.arguments((0, 2, 1, 3, 4, 5, 6), torch.float32), [(0, 2, 3, 6), (0, 2, 3)]),
        (attention.arguments((2, 2, 1, 0, 4, 5, 6), torch.float32, causal=2), [(2, 2, 0, 6), (2, 2, 0)]),
        (attention.arguments((2, 2, 1, 3, 0, 5, 6), torch.float32, mask="shown"), [(2, 2, 3, 6), (2, 2, 3)]),
        (attention.arguments((2, 0, 0, 3, 4, 5, 6), torch.float32), [(2, 0, 3, 6), (2, 0, 3)]),
    ],
)
