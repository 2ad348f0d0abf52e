"""The kernels of every operator, on the CPU and as CUDA kernels, against PyTorch's."""

from __future__ import annotations

import random

import pytest
import torch
from cpp_ext.single_node import CPU, assert_same_bits, run
from operators import SAMPLES, Sample
from operators.strides import moved
from torch import Tensor

from gradfuse.custom_ops import OPS

pytestmark = pytest.mark.usefixtures("device")

CASES = [(op, dtype) for op in OPS for dtype in SAMPLES[op].dtypes]
each_type = pytest.mark.parametrize("op, dtype", CASES, ids=lambda value: str(value).removeprefix("torch."))


def outputs_of(op: str, sample: Sample, threads: int = 1) -> list[Tensor]:
    return run(op, *sample.inputs, threads=threads, **sample.attributes)


def samples_of(op: str, dtype: torch.dtype) -> list[Sample]:
    """Typical samples, small ones of random sizes, and one of some size, in dense memory."""
    torch.manual_seed(0)
    rng = random.Random(0)
    strided = [SAMPLES[op].strided(rng, dtype) for _ in range(4)]
    dense = [
        sample.with_inputs([value if value is None else value.contiguous() for value in sample.inputs])
        for sample in strided
    ]
    return [*SAMPLES[op].all_typical(dtype), *dense, SAMPLES[op].sized(11, dtype)]


@each_type
@pytest.mark.sampled(every=2)
def test_results_are_those_of_pytorch_and_the_same_bits_for_any_number_of_threads(
    device: str, op: str, dtype: torch.dtype
) -> None:
    parts = SAMPLES[op].parts(dtype) if device == CPU else ()
    for sample in [*samples_of(op, dtype), *parts]:
        outputs = outputs_of(op, sample)
        SAMPLES[op].assert_close(outputs, sample, dtype)
        for one, two in zip(outputs, outputs_of(op, sample, threads=2), strict=True):
            assert_same_bits(one, two)


@each_type
@pytest.mark.sampled(every=3)
def test_bits_do_not_depend_on_where_the_inputs_lie(op: str, dtype: torch.dtype) -> None:
    """Vector loops that began at an aligned address would add up in another order."""
    for sample in SAMPLES[op].all_rows(1001, dtype):
        expected = outputs_of(op, sample)
        for elements in (1, 3, 5, 8):
            inputs = [None if value is None else moved(value, elements) for value in sample.inputs]
            for output, same in zip(outputs_of(op, sample.with_inputs(inputs)), expected, strict=True):
                assert_same_bits(output, same)


@pytest.mark.parametrize("op", OPS)
def test_empty_tensors(op: str) -> None:
    for sample, shapes in SAMPLES[op].empty:
        outputs = outputs_of(op, sample)
        assert [tuple(output.shape) for output in outputs] == list(shapes)
        assert all(not output.any() for output in outputs)
