"""The readers of products of matrices, one node at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from reader_samples import INT32, Sample, below, compare, s, x


def _read() -> Iterator[Sample]:
    ones, eye = np.ones((3, 1)), np.eye(3)
    yield s("MatMul", x("N", 1, 3), x("N", 3, 1))
    yield s("MatMul", x(2, "N", 3), ones)
    yield s("MatMul", x(3), x(3))
    yield s("MatMul", x("N", 3), eye)
    yield s("MatMul", eye[:, [0, 0, 1, 2]], x(4, "N"))
    yield s("MatMul", x("N", 1), x(1, "M"))
    yield s("Gemm", x("N", 3), ones)
    yield s("Gemm", x("N", 3), eye, x(3), alpha=0.5, beta=3.0)
    yield s("Gemm", x(3, "N"), eye, x(1, 3), transA=1, beta=2.0)
    yield s("Gemm", x("N", 3), np.ones((1, 3)), transB=1, alpha=-1.0)
    yield s("Gemm", x(1, "N"), x(1, "M"), transA=1)
    for equation, *operands in (
        ("ij->i", x("N", 3)),
        ("ij->ji", x("N", 3)),
        ("ij", x("N", 3)),
        ("ba", x("N", 3)),
        ("ij,ij->i", x("N", 3), x("N", 3)),
        ("ij,ij", x("N", 3), x("N", 3)),
        ("...i,...i->...", x(2, "N", 3), x(2, "N", 3)),
        ("i...->...i", x("N", 3, 2)),
        ("i,j->ij", x("N"), x(3)),
        ("i, j -> j i", x("N"), x(3)),
        ("bhij,bhij,bhi->bhi", x(2, 1, "N", 3), x(2, 1, "N", 3), x(2, 1, "N")),
        ("ij,j->ij", x("N", 3), x(3)),
    ):
        yield s("Einsum", *operands, equation=equation)


def _unread() -> Iterator[Sample]:
    """Nodes that may be opaque, but must not be read as something else."""
    yield s("Gemm", below(9, 2, 3, dtype=INT32), np.eye(3, dtype=np.int32), alpha=0.5)
    yield s("MatMul", x("N", 3), x(3, "M"))
    yield s("Einsum", x(3, 3), equation="ii->i")
    yield s("Einsum", x("N", 3), x(3, "M"), equation="ij,jk->ik")
    yield s("MatMul", "FlatRows", x(2, 4))


READ, UNREAD = [*_read()], [*_unread()]


@pytest.mark.parametrize("sample", READ, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    compare(sample)


@pytest.mark.parametrize("sample", UNREAD, ids=str)
def test_form_is_not_worth_something_else(sample: Sample) -> None:
    compare(sample, may_be_opaque=True)
