"""What operators have in common that make one tensor of two of its shape, element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradfuse.custom_ops.operator import Call, Shape

if TYPE_CHECKING:
    import torch

MAX_RANK = 8


def common_shape(call: Call, first: str, second: str) -> Shape:
    """The shape of two inputs.

    Raises:
        ArgumentError: they have different ones, or more than 8 dimensions.
    """
    shapes = {name: call.inputs[name].shape for name in (first, second)}
    for name, shape in shapes.items():
        if shape is not None and len(shape) > MAX_RANK:
            raise call.error(name, f"of rank {len(shape)}", f"at most rank {MAX_RANK}")
    return call.merged(shapes)


def torch_outputs(first: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    """A new tensor like the first one."""
    return (first.new_empty(first.shape),)
