"""The readers of arithmetic and of casts, one node at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from onnx import TensorProto
from reader_samples import (
    BOOL,
    DOUBLE,
    FLOAT,
    HALF,
    INT32,
    INT64,
    Sample,
    below,
    compare,
    condition,
    eighths,
    floats,
    ints,
    positive,
    s,
    scalar,
    x,
)


def _read() -> Iterator[Sample]:
    for op in ("Add", "Sub", "Mul", "Div"):
        yield s(op, x("N", 3), positive("N", 3))
        yield s(op, x("N", 3), positive(3))
        yield s(op, x(3, 1), positive(1, 4))
        yield s(op, floats(2.0), positive("N", "M"))
        yield s(op, x("N", "M"), scalar(4.0))
        yield s(op, x(2, "N", 3), positive("N", 3))
    for op in ("Add", "Sub", "Mul"):
        yield s(op, below(5, "N", 3), below(7, 3))
        yield s(op, below(5, 4, dtype=INT32), below(7, 4, dtype=INT32))
    yield s("Div", "SixTimes", ints(3), opset=20)
    yield s("Sum", x("N", 3))
    yield s("Sum", x("N", 3), x(3), x(1, 1))
    yield s("Mean", x("N", 3), x(3), x("N", 1))
    yield s("Mean", x(2, 3))
    for op in ("Neg", "Exp", "Identity"):
        yield s(op, x("N", 3))
        yield s(op, x())
        yield s(op, x(1, "N", 1))
    yield s("Neg", below(9, "N", 2))
    for op in ("Reciprocal", "Sqrt", "Log"):
        yield s(op, positive("N", 3))
        yield s(op, positive(2, 1))
    for op in ("Cosh", "Sinh"):
        yield s(op, x("N", 3))
        yield s(op, x(2, 1))
    for exponent in (2.0, 1.0, 0.5, -1.0, 3.0, 0.0, -0.5):
        yield s("Pow", positive("N", 3), scalar(exponent))
    yield s("Pow", x("N", 3), floats(2.0))
    yield s("Pow", x("N", 3), scalar(3))
    yield s("Pow", floats(2.0, 3.0, 4.0), scalar(2.0))
    yield s("Pow", below(9, "N", 3), scalar(2))
    yield s("Pow", below(9, "N", 3), scalar(0))
    yield s("Cast", eighths("N", 3), to=FLOAT)
    yield s("Cast", below(9, "N", 3), to=DOUBLE)
    yield s("Cast", condition("N", 3), to=DOUBLE)
    yield s("Cast", condition("N", 3), to=INT64)
    yield s("Cast", below(3, "N", 3), to=BOOL)
    yield s("Cast", below(3, "N", 3), to=INT32)
    yield s("Cast", x("N", 3), to=BOOL)
    yield s("Cast", condition("N", 3), to=TensorProto.INT8)
    yield s("Cast", np.full((2, 2), 3.0), to=INT64)
    yield s("CastLike", below(9, "N", 3), x(1))
    yield s("CastLike", x("N", 3), condition(1))
    yield s("CastLike", condition("N", 3), below(3, 2))


def _unread() -> Iterator[Sample]:
    """Nodes that may be opaque, but must not be read as something else."""
    yield s("Cast", x("N", 3), to=INT64)
    yield s("Cast", np.full((2, 2), 2.5), to=INT64)
    yield s("Cast", np.full((2, 2), 1 << 40), to=INT32)
    yield s("Cast", below(9000, "N", 3, least=4000), to=HALF)
    yield s("Cast", np.full((2, 2), 1 << 31), to=INT32)
    yield s("Cast", below(1000, "N", 3), to=TensorProto.INT8)
    yield s("Cast", below(1000, "N", 3), to=TensorProto.UINT8)
    yield s("Cast", below(9, "N", 3, least=-9), to=TensorProto.UINT8)
    yield s("Div", below(9, "N", 3, least=-9), ints(2))
    yield s("Pow", below(9, "N", 3), scalar(0.5))
    yield s("Pow", below(9, "N", 3), scalar(-1.0))
    yield s("Pow", x("N", 3), x(3))
    yield s("Sqrt", x("N", 3))
    yield s("Log", x("N", 3))


READ, UNREAD = [*_read()], [*_unread()]


@pytest.mark.parametrize("sample", READ, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    compare(sample)


@pytest.mark.parametrize("sample", UNREAD, ids=str)
def test_form_is_not_worth_something_else(sample: Sample) -> None:
    compare(sample, may_be_opaque=True)
