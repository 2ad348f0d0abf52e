"""From the nodes of a graph to the canonical forms of its values."""

from gradfuse.passes.reading.forms import (
    FLOATS,
    Form,
    Forms,
    Opaque,
    attribute,
    axes_of_size_one,
    has_reader,
    is_broadcast_axes,
    is_float,
)
from gradfuse.passes.reading.order import Order

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
