"""What two nodes have in common if a reader says the same of both, so that equal layers of a network are read once."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import Positions
from gradfuse.passes.reading.constants import VECTOR_LIMIT
from gradfuse.passes.reading.known import KnownForms
from gradfuse.passes.reading.nodes import FLOATS


def likeness(forms: KnownForms, node: ir.Node) -> tuple[object, tuple[object, ...]] | None:
    """What nodes have in common of which a reader says the same, up to the names of tensors; and these names.

    A reader that looks at more than operands, attributes and types says nothing of other nodes: see `Forms`.
    """
    if not node.inputs:
        return None
    places: dict[object, int] = {}
    operands = tuple([None if value is None else _operand(forms, value, places) for value in node.inputs])
    if any(isinstance(tensor, Positions) or tensor in forms.tables for tensor in places):
        return None  # of whose names is known what they are the positions or rows of
    ranges = tuple(map(forms.constants.ranges.get, places))
    types = tuple([value.dtype for value in node.outputs])
    return (node.domain, node.op_type, attributes_key(node), operands, ranges, types), tuple(places)


def _operand(forms: KnownForms, value: ir.Value, places: dict[object, int]) -> tuple[object, ...]:
    """All that a reader may ask of an operand, with its tensors numbered as they come."""
    form, array = forms.get(value), forms.constant(value)
    content: object = None
    if array is not None:
        # Readers want the numbers of axes, sizes and the like; others are in the form as far as they matter.
        if array.size <= VECTOR_LIMIT:
            content = (array.dtype, array.shape, array.tobytes())
        elif array.dtype.kind in "iu":
            content = hashlib.sha256(array.tobytes()).digest()
    elif value.dtype not in FLOATS and (vector := forms.vector(value)) is not None:
        content = tuple(vector)
    if form is None:
        return value.dtype, content
    number, tensors = forms.algebra.pattern(form.poly)
    return value.dtype, content, form.groups, number, *[places.setdefault(t, len(places)) for t in tensors]


def attributes_key(node: ir.Node) -> tuple[object, ...]:
    """The attributes of a node, to compare them with those of another one."""
    return tuple(sorted([(n, _attribute_key(a)) for n, a in node.attributes.items()]))


def _attribute_key(attr: ir.Attr) -> object:
    value = attr.value
    if attr.type == ir.AttributeType.TENSOR and value is not None:
        array = np.asarray(value.numpy())
        return (str(array.dtype), array.shape, array.tobytes())
    return tuple(value) if isinstance(value, (list, tuple)) else value
