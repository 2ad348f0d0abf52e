"""`arrays`: tensors of torch as arrays of numpy."""

from __future__ import annotations

import numpy as np
import torch

from gradfuse.models.arrays import to_numpy


def test_bfloat16_becomes_that_of_ml_dtypes() -> None:
    array = to_numpy(torch.tensor([1.0, -2.5], dtype=torch.bfloat16))
    assert array.dtype.name == "bfloat16"
    assert array.astype(np.float32).tolist() == [1.0, -2.5]


def test_an_array_is_a_copy() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    array = to_numpy(tensor)
    array[0] = 1
    assert tensor.tolist() == [0, 0]
