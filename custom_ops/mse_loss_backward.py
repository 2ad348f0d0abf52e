"""MseLossBackward: the gradient of the mean squared error w.r.t. its input (``aten::mse_loss_backward``)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from gradfuse.custom_ops.operator import (
    FLOAT_TYPES,
    Attribute,
    Call,
    Dim,
    Input,
    Operator,
    Output,
    Shape,
    Tensor,
    TorchOp,
    Variant,
    show,
)

if TYPE_CHECKING:
    import torch

_MAX_RANK = 8


def _broadcast(call: Call) -> Shape:
    shapes = {name: tensor.shape for name, tensor in call.inputs.items()}
    known = [shape for shape in shapes.values() if shape is not None]
    for name, shape in shapes.items():
        if shape is not None and len(shape) > _MAX_RANK:
            raise call.error(name, f"of rank {len(shape)}", f"at most rank {_MAX_RANK}")
    rank = max((len(shape) for shape in known), default=0)
    dims: list[Dim] = []
    for axis in range(-rank, 0):
        found = [shape[axis] for shape in known if len(shape) >= -axis]
        sizes = {dim for dim in found if isinstance(dim, int) and dim != 1}
        if len(sizes) > 1:
            listed = ", ".join(f"{n} {show(s)}" for n, s in shapes.items() if s is not None)
            raise call.error("shape of the inputs", listed, "shapes that broadcast together")
        open_dims = {dim for dim in found if not isinstance(dim, int)}
        if sizes:
            dims.append(sizes.pop())
        elif len(open_dims) > 1:
            dims.append(None)
        else:
            dims.append(open_dims.pop() if open_dims else 1)
    return tuple(dims) if len(known) == len(shapes) else None


def _infer(call: Call) -> list[Tensor]:
    if call.attributes["reduction"] not in (0, 1, 2):
        raise call.error("reduction", call.attributes["reduction"], "0 (none), 1 (mean) or 2 (sum)")
    return [Tensor(OPERATOR.dtype(call), _broadcast(call))]


def _choices(call: Call) -> Iterable[str]:
    return []


def _body(variant: Variant) -> str:
    return """
        grad = Cast<to=$real>(grad_output)
        input = Cast<to=$real>(self)
        label = Cast<to=$real>(target)
        reduction_number = Constant<value_int: int = @reduction>()
        mean = Constant<value_int=1>()
        is_mean = Equal(reduction_number, mean)
        count = Size(input)
        divisor = Where(is_mean, count, mean)
        divisor_real = Cast<to=$real>(divisor)
        two = Constant<value_float=2.0>()
        factor = Div(two, divisor_real)
        difference = Sub(input, label)
        scaled = Mul(difference, factor)
        product = Mul(scaled, grad)
        grad_input = CastLike(product, grad_output)
    """


def _torch_outputs(*args: Any) -> tuple[torch.Tensor, ...]:
    shapes = [reversed(tensor.shape) for tensor in args[:3]]
    dims = [next((dim for dim in found if dim != 1), 1) for found in zip_longest(*shapes, fillvalue=1)]
    return (args[0].new_empty(dims[::-1]),)


def _torch_fake(*args: Any) -> tuple[torch.Tensor, ...]:
    import torch

    shape = torch.broadcast_shapes(*(tensor.shape for tensor in args[:3]))  # type: ignore[no-untyped-call]
    return (args[0].new_empty(shape),)


OPERATOR = Operator(
    name="MseLossBackward",
    stem="mse_loss_backward",
    doc=(
        "Gradient of the mean squared error w.r.t. its input, as PyTorch's mse_loss_backward: "
        "2 (self - target) grad_output, for reduction mean divided by the number of elements of self. "
        "All three inputs broadcast together; nothing is summed back to the shape of self."
    ),
    summary="mean squared error",
    counterpart="`aten::mse_loss_backward`",
    inputs=(
        Input("grad_output", "T", "Gradient of the loss, rank 0 to 8."),
        Input("self", "T", "Input of the loss, rank 0 to 8."),
        Input("target", "T", "Target of the loss, rank 0 to 8."),
    ),
    outputs=(Output("grad_input", "Gradient w.r.t. self, of the broadcast shape of all inputs."),),
    attributes=(Attribute("reduction", 1, "0 none, 1 mean, 2 sum."),),
    constraints={"T": FLOAT_TYPES},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(
        outputs=_torch_outputs,
        fake=_torch_fake,
    ),
    aten=("mse_loss_backward.default",),
)
