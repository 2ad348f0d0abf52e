"""Fixtures of the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cpp_ext.single_node import CPU, CUDA_SIMT, use_device


@pytest.fixture(scope="module", params=[CPU, CUDA_SIMT])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device that kernels run on, one after the other."""
    use_device(request.param)
    yield request.param
    use_device(CPU)
