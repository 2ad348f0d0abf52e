"""The kernel of GroupedBiasAddGrad: empty groups, many groups, order of additions."""

from __future__ import annotations

import pytest
import torch
from cpp_ext.single_node import CUDA_SIMT, FLOATS, assert_refused, assert_same_bits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from operators.grouped_bias_add_grad import grouped_bias_add_grad
from torch import Tensor

from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("device")

OP = "GroupedBiasAddGrad"


def check(grad_y: Tensor, group_idx: Tensor | None = None) -> Tensor:
    (actual,) = run(OP, grad_y, group_idx)
    native = grouped_bias_add_grad(grad_y, group_idx, dtype=grad_y.dtype)
    reference = grouped_bias_add_grad(grad_y, group_idx)
    magnitude = grouped_bias_add_grad(grad_y.abs(), group_idx)
    assert_gradients_close(actual, native, reference, grad_y.dtype, terms=magnitude.numpy())
    return actual


@given(
    sizes=st.lists(st.one_of(st.just(0), st.integers(0, 5), st.integers(100, 300)), max_size=8),
    columns=st.integers(0, 20),
    index_type=st.sampled_from((torch.int64, torch.int32)),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_groups_by_ends(sizes: list[int], columns: int, index_type: torch.dtype, dtype: torch.dtype, seed: int) -> None:
    grad_y = torch.randn(sum(sizes), columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    check(grad_y, torch.tensor(sizes, dtype=index_type).cumsum(0).to(index_type))


@given(
    shape=st.tuples(st.integers(0, 5), st.one_of(st.integers(0, 5), st.integers(100, 300)), st.integers(0, 20)),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_groups_of_equal_size(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    check(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "columns, ends",
    [
        (64, [10000]),
        (64, [*[3] * 1000, 7000, *[7000] * 1045, 9999, 10000]),
        (64, [*range(128, 10001, 128), 10000]),
        (5000, [1, 200, 600]),
    ],
    ids=["one group", "mostly empty", "ends of chunks", "many columns"],
)
def test_skewed_groups_and_the_same_bits_for_any_number_of_threads(
    dtype: torch.dtype, columns: int, ends: list[int]
) -> None:
    grad_y = torch.randn(ends[-1], columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    group_idx = torch.tensor(ends)
    out = check(grad_y, group_idx)
    assert_same_bits(out, *run(OP, grad_y, group_idx, threads=2))


def test_example_of_the_original() -> None:
    (out,) = run(OP, torch.ones(1000, 30), torch.tensor([400, 600, 1000]))
    assert torch.equal(out, torch.tensor([400.0, 200.0, 400.0])[:, None].expand(3, 30))


def test_error_does_not_grow_with_the_rows() -> None:
    """Sums that float32 loses when it adds one row after the other, and bfloat16 long before."""
    grad_y = torch.full((400_000, 2), 0.1, dtype=torch.float32)
    (out,) = run(OP, grad_y, torch.tensor([400_000]))
    reference = grad_y.double().sum(0, keepdim=True)
    assert (out.double() / reference - 1).abs().max() < 4 * torch.finfo(torch.float32).eps
    (out,) = run(OP, torch.ones(4096, 2, dtype=torch.bfloat16), torch.tensor([4096]))
    assert torch.equal(out.float(), torch.full((1, 2), 4096.0))


def test_nan_and_infinity_stay_in_their_group() -> None:
    grad_y = torch.ones(300, 3)
    grad_y[10, 0], grad_y[200, 1], grad_y[299, 2] = torch.nan, torch.inf, -torch.inf
    check(grad_y, torch.tensor([100, 250, 300]))


@pytest.mark.parametrize("device", [CUDA_SIMT], indirect=True)
@pytest.mark.parametrize("index_type", (torch.int64, torch.int32))
@pytest.mark.parametrize(
    "ends, clamped",
    [
        ([300, 200, 400], [300, 300, 400]),
        ([-5, 100, 400], [0, 100, 400]),
        ([100, 2**31 - 1, 50], [100, 400, 400]),
        ([100, 200, 300], [100, 200, 300]),
        ([-(2**31), -1, -1], [0, 0, 0]),
    ],
)
def test_ends_out_of_order_are_clamped_where_no_check_can_read_them(
    ends: list[int], clamped: list[int], index_type: torch.dtype
) -> None:
    grad_y = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    (out,) = run(OP, grad_y, torch.tensor(ends, dtype=index_type))
    with pytest.raises(Exception, match="group_idx is out of range in an earlier run"):
        run(OP, grad_y, torch.tensor(ends, dtype=index_type))
    expected = torch.stack(
        [grad_y[begin:end].double().sum(0) for begin, end in zip([0, *clamped], clamped, strict=False)]
    )
    assert_gradients_close(out, expected.float(), expected, torch.float32, terms=grad_y.abs().sum(0).numpy())


ROWS = torch.zeros(4, 2)


@pytest.mark.parametrize(
    "grad_y, group_idx, message",
    [
        (ROWS, [3, 2, 4], "group_idx[1] is 2; expected at least 3: ends of groups do not decrease"),
        (ROWS, [-1, 4], "group_idx[0] is -1; expected at least 0: ends of groups do not decrease"),
        (ROWS, [1, 3], "group_idx[1] is 3; expected 4: the last group ends with the last row of grad_y"),
        (ROWS, [1, 2**40], f"group_idx[1] is {2**40}; expected 4: the last group ends with the last row of grad_y"),
        (ROWS, [], "group_idx is int64(0); expected a group for each of the 4 rows of grad_y"),
        (ROWS, [[4]], "group_idx is int64(1,1); expected shape (G) with G at most 2048"),
        (ROWS, [4] * 2049, "group_idx is int64(2049); expected shape (G) with G at most 2048"),
        (ROWS[None], [4], "grad_y is float32(1,4,2); expected 2 dimensions (R,H), as group_idx is given"),
        (ROWS, None, "grad_y is float32(4,2); expected 3 dimensions (G,C,H), as group_idx is absent"),
    ],
)
def test_bad_arguments(grad_y: Tensor, group_idx: list[int] | None, message: str) -> None:
    assert_refused(OP, message, [grad_y, None if group_idx is None else torch.tensor(group_idx, dtype=torch.int64)], {})
