"""What operators that update parameters check alike."""

from __future__ import annotations

from collections.abc import Iterable

from gradfuse.custom_ops.operator import Call, Shape

_MAX_RANK = 8


def common_shape(call: Call, names: Iterable[str]) -> Shape:
    """The shape that those of the named inputs have which are there; None if none is known.

    Raises:
        ArgumentError: two differ, or there are more dimensions than the kernels take.
    """
    shapes = {name: call.inputs[name].shape for name in names if name in call.inputs}
    first, whole = next(((name, shape) for name, shape in shapes.items() if shape is not None), ("", ()))
    if len(whole) > _MAX_RANK:
        raise call.error(first, f"of rank {len(whole)}", f"at most rank {_MAX_RANK}")
    return call.merged(shapes)
