"""Whether a graph has the gradient of something that it computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from gradfuse.passes.matching import TOLERANCE, Site

CONTRACTIONS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "RNN", "Attention"}
"""Operators that end a region: what is behind them belongs to another layer."""


def has_gradient(site: Site, values: set[ir.Value]) -> bool:
    """Whether an output of the graph depends on the values and has the shape of an input or weight: its gradient.

    It may have the dimensions in another order, or as the rows of a matrix.
    """
    initializers = [v for v in site.graph.initializers.values() if len(v.shape or ()) > 1]
    weights = [list(v.shape) for v in (*site.graph.inputs, *initializers) if v.dtype in TOLERANCE and v.shape]
    later = set(values)
    for node in site.graph:
        if any(v in later for v in node.inputs):
            later.update(node.outputs)
    shapes = [list(v.shape) for v in site.graph.outputs if v in later and v.shape is not None]
    return any(_is_of(shape, weight) for shape in shapes for weight in weights)


def _is_of(shape: Sequence[Any], weight: Sequence[Any]) -> bool:
    """Whether a gradient of a tensor may have a shape, in which sizes of other names may be the same."""
    # onnx-ad gives gradients a further dimension at the end.
    if list(shape[: len(weight)]) == list(weight):
        return True
    if len(weight) < 2 or len(shape) < 2:
        return False
    sizes, others = ([size for size in sizes if isinstance(size, int)] for sizes in (shape, weight))
    if len(sizes) == len(shape) and len(others) == len(weight):
        return sorted(sizes) == sorted(others) or (
            sizes[-1] == others[-1] > 1 and math.prod(sizes) == math.prod(others) and len(sizes) < len(others)
        )
    pairs = [(a, b) for a, b in zip(shape, weight, strict=False) if isinstance(a, int) and isinstance(b, int)]
    return len(shape) == len(weight) and all(a == b for a, b in pairs) and any(a > 1 for a, _ in pairs)
