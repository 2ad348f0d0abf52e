"""The kernel of CastBfloat16."""

from __future__ import annotations

import pytest
import torch
from cpp_ext.single_node import assert_refused, run
from onnx import TensorProto

FLOAT = TensorProto.FLOAT
pytestmark = pytest.mark.usefixtures("device")


def test_every_bfloat16_is_widened_exactly() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    (out,) = run("CastBfloat16", every, to=FLOAT)
    assert torch.equal(out.view(torch.int32), every.float().view(torch.int32))


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    """Whatever the last sixteen bits are near a tie, beside each bfloat16: subnormals, infinities and NaN as well."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int64)[:, None] * 2**16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    numbers = (high + low).flatten().to(torch.int32).view(torch.float32)
    (out,) = run("CastBfloat16", numbers)
    wanted, is_nan = numbers.bfloat16(), numbers.isnan()
    assert torch.equal(out[~is_nan].view(torch.int16), wanted[~is_nan].view(torch.int16))
    assert out[is_nan].isnan().all()


@pytest.mark.parametrize("count", [0, 1, 31, 32769, 2**21 + 7])
def test_every_part_is_written(count: int) -> None:
    numbers = torch.linspace(-3, 3, count)
    (out,) = run("CastBfloat16", numbers, threads=2)
    assert torch.equal(out, numbers.bfloat16())
    (back,) = run("CastBfloat16", out, threads=2, to=FLOAT)
    assert torch.equal(back, numbers.bfloat16().float())


def test_a_type_that_is_not_the_other_is_refused() -> None:
    assert_refused("CastBfloat16", "to is 1; expected 16, as self is float32", [torch.zeros(2)], {"to": FLOAT})
