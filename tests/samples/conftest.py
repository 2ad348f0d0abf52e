"""Options of the tests of samples."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshot", help="where to keep a picture of the page that trains in a browser")
