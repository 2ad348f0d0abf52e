"""What operators that update parameters check alike."""

from __future__ import annotations

from collections.abc import Iterable

from gradfuse.custom_ops.operator import Call, Dim, Shape, show

_MAX_RANK = 8


def common_shape(call: Call, names: Iterable[str]) -> Shape:
    """The shape that those of the named inputs have which are there; None if none is known.

    Raises:
        ArgumentError: two differ, or there are more dimensions than the kernels take.
    """
    shapes = {name: call.inputs[name].shape for name in names if name in call.inputs}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    if not known:
        return None
    first, whole = next(iter(known.items()))
    if len(whole) > _MAX_RANK:
        raise call.error(first, f"of rank {len(whole)}", f"at most rank {_MAX_RANK}")
    dims: list[Dim] = list(whole)
    for name, shape in known.items():
        if len(shape) != len(dims):
            raise call.error(name, f"of shape {show(shape)}", f"shape {show(dims)}, as {first}")
        dims = [call.same(name, f"dimension {axis}", *pair) for axis, pair in enumerate(zip(dims, shape, strict=True))]
    return tuple(dims)
