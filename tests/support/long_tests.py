"""Parameters of tests, most of which are left to `make test-long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_long(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return values to parametrize a test with, of which those that are not quick are long tests."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.long) for value in values]
