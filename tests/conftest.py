"""Settings of every test run."""

from __future__ import annotations

import functools
import os
from typing import Any

import hypothesis
import pytest

# Tests run in as many processes as there are cores already; onnxruntime's threads are set where they are tested.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under continuous integration the same examples run every time; elsewhere new ones are found. No test is timed.
hypothesis.settings.register_profile(
    "gradfuse", deadline=None, derandomize=os.environ.get("CI") == "true", print_blob=True
)
hypothesis.settings.load_profile("gradfuse")


@pytest.fixture(scope="session", autouse=True)
def _signatures_of_translations_are_kept() -> None:
    """torch.onnx.export parses the sources of all its translations again in each call, a quarter of its time."""
    from onnxscript import values

    translation: Any = values.TracedOnnxFunction
    signature = functools.cached_property(translation.function_ir.fget)
    signature.__set_name__(translation, "function_ir")
    translation.function_ir = signature
