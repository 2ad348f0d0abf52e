"""CastBfloat16: between float32 and bfloat16, by vectors and all threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops.elementwise import MAX_RANK
from gradfuse.custom_ops.operator import Attribute, Call, Input, Operator, Output, Tensor, TorchOp, type_string

if TYPE_CHECKING:
    import torch


def _infer(call: Call) -> list[Tensor]:
    shape = call.inputs["self"].shape
    if shape is not None and len(shape) > MAX_RANK:
        raise call.error("self", f"of rank {len(shape)}", f"at most rank {MAX_RANK}")
    (dtype,) = OPERATOR.types_of_outputs(call)
    if dtype not in (TensorProto.UNDEFINED, call.attributes["to"]):
        wanted = f"{dtype}, as self is {type_string(OPERATOR.dtype(call))}"
        raise call.error("to", call.attributes["to"], wanted)
    return [Tensor(dtype, shape)]


def _torch_outputs(self: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    import torch

    return (self.new_empty(self.shape, dtype=torch.float if self.dtype == torch.bfloat16 else torch.bfloat16),)


OPERATOR = Operator(
    name="CastBfloat16",
    stem="cast_bfloat16",
    doc="Casts float32 to bfloat16, rounded to the nearest, ties to even, or bfloat16 to float32.",
    summary="(a cast between float32 and bfloat16)",
    counterpart="`aten::_to_copy`",
    inputs=(Input("self", "T", "Numbers, rank 0 to 8."),),
    outputs=(Output("output", "The same in the other type.", type="U"),),
    attributes=(Attribute("to", int(TensorProto.BFLOAT16), "Type of output: 16, or 1 (float)."),),
    constraints={"T": ("tensor(float)", "tensor(bfloat16)"), "U": ("tensor(bfloat16)", "tensor(float)")},
    infer=_infer,
    choices=lambda _: (),
    body=lambda _: "output = Cast<to: int = @to>(self)",
    torch_op=TorchOp(outputs=_torch_outputs),
)
