"""Views of the C API: any strides that are not negative, of inputs and outputs, against PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from cpp_ext.single_node import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES
from operators.mse_loss_backward import mse_loss_backward
from operators.strides import POISON, scattered
from torch import Tensor

from cpp_ext import capi
from gradfuse.custom_ops import OPS
from gradfuse.testing import assert_gradients_close


def poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, POISON, memory_format=torch.contiguous_format)


def memory_of(view: Tensor) -> Tensor:
    """All of the memory that a view lies in."""
    size = view.untyped_storage().nbytes() // view.element_size()
    return view.as_strided((size,), (1,), 0)


def check(op: str, dtype: torch.dtype, rng: random.Random) -> None:
    sample = SAMPLES[op].strided(rng, dtype)
    natives = SAMPLES[op].expected(sample, dtype)
    outputs = [scattered(poisoned(native), rng) for native in natives]
    capi.run(op, sample.inputs, outputs, **sample.attributes)
    SAMPLES[op].assert_close(outputs, sample, dtype)
    # Dense copies of the same give the same bits, and nothing beside the outputs was written.
    dense = [poisoned(native) for native in natives]
    capi.run(op, [None if value is None else value.contiguous() for value in sample.inputs], dense, **sample.attributes)
    for output, expected in zip(outputs, dense, strict=True):
        assert_same_bits(output, expected)
        output.fill_(POISON)
        assert bool((memory_of(output) == POISON).all())


@pytest.mark.parametrize("op", OPS)
@given(seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=25)
def test_any_strides_give_what_dense_tensors_give(op: str, seed: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(SAMPLES[op].dtypes))
    torch.manual_seed(seed)
    check(op, dtype, random.Random(seed))


def test_large_views_are_packed_by_all_threads() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(700, 600).t(), torch.randn(600, 1).expand(600, 700), torch.randn(1200, 700)[::2]]
    output = torch.full((700, 1200), float(POISON)).t()[::2]
    capi.run("MseLossBackward", inputs, [output], reduction=0)
    assert_gradients_close(
        output,
        mse_loss_backward(*inputs, reduction=0, dtype=torch.float32),
        mse_loss_backward(*inputs, reduction=0),
        torch.float32,
    )


def overlapping() -> Sequence[Callable[[Tensor], tuple[list[Tensor], Tensor]]]:
    return (
        lambda memory: ([memory[:6], memory[6:12], memory[12:18]], memory[:6]),  # in place
        lambda memory: ([memory[:6], memory[6:12], memory[12:18]], memory[3:9]),  # across two inputs
        lambda memory: ([memory[0:12:2], memory[1:13:2], memory[12:18]], memory[0:12:2]),  # in place, with gaps
        lambda memory: ([memory[:6], memory[6:12], memory[:6]], memory[2:8]),
    )


@pytest.mark.parametrize("views", overlapping())
def test_an_output_may_lie_on_inputs(views: Callable[[Tensor], tuple[list[Tensor], Tensor]]) -> None:
    torch.manual_seed(0)
    inputs, output = views(torch.randn(20))
    expected = mse_loss_backward(*[value.clone() for value in inputs], reduction=1, dtype=torch.float32)
    capi.run("MseLossBackward", inputs, [output])
    torch.testing.assert_close(output, expected)


def test_elements_of_an_output_at_one_place_hold_one_of_their_values() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(300, 200) for _ in range(3)]
    output = torch.full((300, 1), float(POISON)).expand(300, 200)
    capi.run("MseLossBackward", inputs, [output], reduction=0)
    expected = torch.empty(300, 200)
    capi.run("MseLossBackward", inputs, [expected], reduction=0)
    assert bool((output == expected).any(1).all())
