"""What EmbeddingDenseBackward computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS, inferred, refuses, run
from onnx import TensorProto

from gradfuse.errors import ArgumentError

OP = "EmbeddingDenseBackward"
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", [5, -1, -6, 2**40])
def test_bad_indices_are_an_error_at_run_time(backend: str, index: int) -> None:
    with refuses(backend, "index_out_of_range"):
        run(OP, backend, torch.ones(2, 3), torch.tensor([0, index]), ranks=[2], num_weights=5, padding_idx=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_row_and_padding_drops_it(backend: str) -> None:
    grad = torch.ones(4, 2)
    grad[1:3, 0] = torch.nan
    (out,) = run(OP, backend, grad, torch.tensor([0, 1, 3, 0]), ranks=[2], num_weights=5, padding_idx=3)
    expected = torch.tensor([[2.0, 2.0], [torch.nan, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_shapes() -> None:
    assert inferred(OP, (FLOAT, ("B", "T", 4)), (INT64, ("B", "T")), num_weights=7) == [(FLOAT, (7, 4))]
    assert inferred(OP, (FLOAT, ("C",)), (INT64, ()), num_weights=7) == [(FLOAT, (7, "C"))]


def test_refusals() -> None:
    with pytest.raises(
        ArgumentError, match=r"indices is of shape \(2\); expected shape \(2, 3\), as grad_output's rows"
    ):
        inferred(OP, (FLOAT, (2, 3, 4)), (INT64, (2,)), num_weights=7)
    with pytest.raises(ArgumentError, match=r"indices is of dimension 1 4; expected dimension 1 3"):
        inferred(OP, (FLOAT, (2, 3, 4)), (INT64, (2, 4)), num_weights=7)
    with pytest.raises(ArgumentError, match=r"grad_output is of rank 0; expected rank 1 to 8"):
        inferred(OP, (FLOAT, ()), (INT64, ()), num_weights=7)
    with pytest.raises(ArgumentError, match=r"num_weights is -1; expected 0 to 2147483647"):
        inferred(OP, (FLOAT, (2, 4)), (INT64, (2,)), num_weights=-1)
    with pytest.raises(ArgumentError, match=r"scale_grad_by_freq is 2; expected 0 or 1"):
        inferred(OP, (FLOAT, (2, 4)), (INT64, (2,)), num_weights=3, scale_grad_by_freq=2)
