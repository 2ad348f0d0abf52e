"""Functions of single elements compute what ATen's compute, at their edges too, as do their gradients."""

from __future__ import annotations

import pytest
import torch
from export.decompositions.test_products import assert_same

from gradfuse.export.decompositions import elementwise

EDGES = torch.tensor([-torch.inf, -2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, torch.inf])


@pytest.mark.parametrize("name", ["fmax", "fmin"])
def test_extremes_beside_nan(name: str) -> None:
    ours, native = getattr(elementwise, name), getattr(torch, name)
    a = torch.cat([EDGES, torch.tensor([torch.nan])])
    assert_same(ours, native, a.unsqueeze(0), a.unsqueeze(1))
    assert_same(ours, native, torch.randn(3, 4), torch.randn(4))


def test_bounds_leave_the_gradient_to_what_is_clamped_at_them() -> None:
    low, high = torch.tensor(-1.0), torch.tensor([0.5])
    assert_same(elementwise.clamp, torch.clamp, EDGES, low, high)
    assert_same(elementwise.clamp, torch.clamp, EDGES, torch.tensor([0.5]), torch.tensor([-1.0]))
    assert_same(elementwise.clamp, torch.clamp_min, EDGES, low)
    assert_same(elementwise.clamp_max, torch.clamp_max, EDGES, high)


def test_sums_of_masks_are_masks() -> None:
    a, b = torch.tensor([True, False]), torch.tensor([[True], [False]])
    assert torch.equal(elementwise.add(a, b), a + b)


@pytest.mark.parametrize("number", [None, 2.0, -0.0, -3.0])
def test_signs_of_others(number: float | None) -> None:
    # PyTorch's gradient of an infinity is NaN.
    finite = EDGES[EDGES.isfinite()]
    for sign in EDGES if number is None else [number]:
        assert_same(lambda a, b=sign: elementwise.copysign(a, b), lambda a, b=sign: torch.copysign(a, b), finite)
    assert elementwise.copysign(torch.arange(3), torch.tensor(-1.0)).tolist() == [-0.0, -1.0, -2.0]


def test_sign_bits() -> None:
    assert torch.equal(elementwise.signbit(EDGES), EDGES.signbit())
    assert torch.equal(elementwise.signbit(torch.arange(-2, 3)), torch.arange(-2, 3).signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mantissas_and_exponents(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    powers = 2.0 ** torch.arange(-20.0, 20.0, dtype=dtype)
    x = torch.cat(
        [EDGES.to(dtype), powers, -powers * (1 - limits.eps), powers * (1 + limits.eps), torch.randn(50, dtype=dtype)]
    )
    x = torch.cat([x, torch.tensor([limits.max, limits.tiny, -limits.tiny], dtype=dtype)])
    for ours, native in zip(elementwise.frexp(x), torch.frexp(x), strict=True):
        assert torch.equal(ours, native)
    assert_same(lambda x: elementwise.frexp(x)[0], lambda x: torch.frexp(x)[0], torch.randn(9) * 100)
