"""From the nodes of a graph to the canonical forms of its values.

A form (`Form`) says how each element of a tensor is computed: as a polynomial of `gradfuse.passes.algebra` in index
variables, which are numbered 0, 1, ... and dealt out to the dimensions, outermost first. A dimension of size 1 has no
variable. Equal computations have equal forms, however an exporter wrote them.

`Forms` walks over a graph in order. Each node goes to the *reader* of its operator, a function of the forms that are
known so far and the node:

- A reader of arithmetic computes with polynomials, one of views with index variables.
- Where it has no rule for a node it raises `Opaque`. The output then is a tensor of its own, with a name for the
  operator and the operands.
- Its result is used again for equal nodes on other tensors (`replay.py`), so that a network's layers are read once.

`reads` registers a reader. For example, for Add, with broadcasting::

    @reads("Add")
    def _add(forms: KnownForms, node: ir.Node) -> Form:
        groups, (a, b) = forms.broadcast(forms.operands(node))
        return Form(groups, a + b)

From float[n, 3] x and float[3] b this makes the form with groups ((n,), (3,)) and the polynomial x[v0, v1] + b[v1].

To add a reader, write such a function in the file of its family, and samples in the family's test file. A reader may
look at operands, attributes and types, and at more only if it says so to `reads`: at the shapes that the model states
for outputs with `uses_output_shape=True` (and `forms.output`), at the nodes that compute operands with
`uses_producers=True` (and `forms.producer`).

============================  ==========================================================================================
families of readers           arithmetic, conditions, distances, generators, indexing, ort_training, pieces, products,
                              reductions, views
what they see of a graph      known, with layouts, constants, dims and vectors as its parts
the walk                      forms, with registry, replay, and unread for what no reader expresses
other facts about values      order
============================  ==========================================================================================
"""

from gradfuse.passes.reading import (
    arithmetic,
    conditions,
    distances,
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

FAMILIES = (
    arithmetic,
    conditions,
    distances,
    generators,
    indexing,
    ort_training,
    pieces,
    products,
    reductions,
    views,
)
"""The modules that have readers: importing them registers these."""

__all__ = [
    "FAMILIES",
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
