"""PyTorch's answer to every operator, and arguments for it: a module an operator, found by the operator's stem."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from gradfuse.custom_ops import OPS
from operators.base import FLOATS, Sample, Samples, as_tuple

__all__ = ["FLOATS", "SAMPLES", "Sample", "Samples", "as_tuple"]

SAMPLES: Mapping[str, Samples] = {
    name: importlib.import_module(f"{__name__}.{operator.stem}").SAMPLES for name, operator in OPS.items()
}
"""Of each operator, by its ONNX name, what the tests of all operators ask of it."""
