"""What GPUs are compared with, by numpy alone, is PyTorch's answer too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from operators import SAMPLES, Sample

from gradfuse.custom_ops import OPS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpp_ext" / "tests" / "device"))
from cases import cases


@pytest.mark.parametrize("op", OPS)
def test_cases_have_the_results_of_pytorch(op: str) -> None:
    checked = 0
    for case in cases(large=False, only=op):
        if case.dtype != "float32" or case.fault != 0:
            continue
        inputs = [None if values is None else torch.from_numpy(values.bits) for values in case.inputs]
        outputs = SAMPLES[op].expected(Sample(inputs, case.attributes), torch.float64)
        assert case.problem([output.numpy() for output in outputs]) == "", case.name
        checked += 1
    assert checked > 2
