"""The function body of every operator, in stock onnxruntime and in onnx.reference, against PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backends import BACKENDS, opsets, run
from operators import SAMPLES

from gradfuse.custom_ops import OPS


def _cases() -> Iterator[Any]:
    """What a body says follows from the opset, whatever the type, and changes in few: opsets between ends are long."""
    for op, operator in OPS.items():
        known = [opset for opset in opsets() if opset >= operator.oldest_opset]
        for dtype in SAMPLES[op].dtypes:
            for opset in known:
                is_short = opset in (known[0], known[-1])
                yield pytest.param(op, dtype, opset, marks=() if is_short else pytest.mark.long)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op, dtype, opset", _cases(), ids=lambda value: str(value).removeprefix("torch."))
@pytest.mark.sampled(every=3)
def test_agrees_with_pytorch(backend: str, op: str, dtype: torch.dtype, opset: int) -> None:
    for sample in SAMPLES[op].all_typical(dtype):
        native = SAMPLES[op].expected(sample, dtype)
        ranks = [output.dim() for output in native]
        outputs = run(op, backend, *sample.inputs, ranks=ranks, opset=opset, **sample.attributes)
        typed = [output.to(other.dtype) for output, other in zip(outputs, native, strict=True)]
        SAMPLES[op].assert_close(typed, sample, dtype)
