"""From the nodes of a graph to the canonical forms of its values."""

from gradfuse.passes.reading import (
    arithmetic,
    conditions,
    generators,
    indexing,
    ort_training,
    pieces,
    products,
    reductions,
    views,
)
from gradfuse.passes.reading.forms import Forms
from gradfuse.passes.reading.layouts import Form
from gradfuse.passes.reading.nodes import FLOATS, Opaque, attribute, is_float
from gradfuse.passes.reading.order import Order
from gradfuse.passes.reading.reductions import axes_of_size_one, is_broadcast_axes
from gradfuse.passes.reading.registry import has_reader

FAMILIES = (arithmetic, conditions, generators, indexing, ort_training, pieces, products, reductions, views)
"""The modules that have readers, which are registered where they are imported."""

__all__ = [
    "FLOATS",
    "Form",
    "Forms",
    "Opaque",
    "Order",
    "attribute",
    "axes_of_size_one",
    "has_reader",
    "is_broadcast_axes",
    "is_float",
]
