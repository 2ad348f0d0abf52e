"""FusedMatmul: a product of matrices with transposed factors and a bias, in 16 bits too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from onnx import TensorProto

from gradfuse.custom_ops.operator import (
    FLOAT_TYPES,
    PAIRS,
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
)

if TYPE_CHECKING:
    import torch

MOST_DIMENSIONS = 8


def _infer(call: Call) -> list[Tensor]:
    call.flag("factors_in_bfloat16")
    for name in ("a", "b"):
        call.flag(f"trans_{name}")
        shape = call.inputs[name].shape
        if shape is not None and not 2 <= len(shape) <= MOST_DIMENSIONS:
            raise call.error(name, f"of rank {len(shape)}", f"rank 2 to {MOST_DIMENSIONS}")
    a, b = call.inputs["a"].shape, call.inputs["b"].shape
    rows, depth = _matrix(a, call.attributes["trans_a"])
    other_depth, columns = _matrix(b, call.attributes["trans_b"])
    call.same("b", f"dimension {-1 if call.attributes['trans_b'] else -2}", depth, other_depth)
    columns = call.same("bias", "size", columns, *call.shape("bias", "columns of the product"))
    dtype = OPERATOR.dtype(call)
    return [Tensor(dtype) if a is None or b is None else Tensor(dtype, (*_batch(call, a, b), rows, columns))]


def _matrix(shape: Shape, transposed: object) -> tuple[Dim, Dim]:
    """Rows and columns of a factor."""
    if shape is None:
        return None, None
    return (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])


def _batch(call: Call, a: Sequence[Dim], b: Sequence[Dim]) -> list[Dim]:
    """The dimensions before those of the matrices, broadcast."""
    found: list[Dim] = []
    for axis, pair in enumerate(zip_longest(reversed(a[:-2]), reversed(b[:-2]), fillvalue=1)):
        sizes = {size for size in pair if isinstance(size, int) and size != 1}
        if len(sizes) > 1:
            raise call.error("b", f"of dimension {-3 - axis} {pair[1]}", f"{pair[0]} or 1")
        # A size with a name may be 1.
        named = {size for size in pair if not isinstance(size, int)}
        found.append(
            sizes.pop() if sizes else 1 if not named else named.pop() if pair[0] == pair[1] or 1 in pair else None
        )
    return found[::-1]


def _choices(call: Call) -> Iterator[str]:
    for name in ("a", "b"):
        if call.attributes[f"trans_{name}"]:
            shape = call.inputs[name].shape
            if shape is None:
                raise call.error(name, "of unknown rank", "a tensor of known rank")
            yield f"trans_{name}_{len(shape)}"
    if call.attributes["factors_in_bfloat16"]:
        yield "rounded"


def _body(variant: Variant) -> str:
    lines, factors = [], []
    for name in ("a", "b"):
        source = name
        if "rounded" in variant.choices:
            source = f"rounded_{name}"
            lines.append(f"{source} = Cast<to={TensorProto.BFLOAT16}>({name})")
        lines.append(f"real_{name} = Cast<to=$real>({source})")
        factors.append(f"real_{name}")
        for rank in range(2, MOST_DIMENSIONS + 1):
            if f"trans_{name}_{rank}" in variant.choices:
                axes = [*range(rank - 2), rank - 1, rank - 2]
                lines.append(f"turned_{name} = Transpose<perm={axes}>(real_{name})")
                factors[-1] = f"turned_{name}"
    lines.append(f"product = MatMul({', '.join(factors)})")
    result = "product"
    if "bias" in variant.inputs:
        lines += ["real_bias = Cast<to=$real>(bias)", "moved = Add(product, real_bias)"]
        result = "moved"
    return "\n".join([*lines, f"output = CastLike({result}, a)"])


def _torch_outputs(
    a: torch.Tensor, b: torch.Tensor, bias: object, trans_a: bool, trans_b: bool, *_: object
) -> tuple[torch.Tensor, ...]:
    import torch

    if min(a.dim(), b.dim()) < 2:
        return (a.new_empty(0),)
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    except RuntimeError:
        batch = a.shape[:-2]
    return (a.new_empty((*batch, a.shape[-1 if trans_a else -2], b.shape[-2 if trans_b else -1])),)


OPERATOR = Operator(
    name="FusedMatmul",
    stem="fused_matmul",
    doc=(
        "Matrix product a b + bias, with the last two axes of a factor swapped where trans_a or trans_b is 1; the axes "
        "before these are broadcast, as in MatMul. Sums are in float32, and rounded once. " + PAIRS
    ),
    summary="(a product of matrices, in bfloat16 where onnxruntime has none)",
    counterpart="`aten::matmul`, `aten::linear`",
    inputs=(
        Input("a", "T", "Left factor, (*, M, K), or (*, K, M) with trans_a."),
        Input("b", "B", "Right factor, (*, K, N), or (*, N, K) with trans_b."),
        Input("bias", "T", "What is added to each row of the product, (N). Absent: 0.", optional=True),
    ),
    outputs=(Output("output", "The product, (*, M, N)."),),
    attributes=(
        Attribute("trans_a", 0, "1: the last two axes of a are swapped.", flag=True),
        Attribute("trans_b", 0, "1: the last two axes of b are swapped.", flag=True),
        Attribute(
            "factors_in_bfloat16", 0, "1: a and b are rounded to bfloat16 before they are multiplied.", flag=True
        ),
    ),
    constraints={"T": FLOAT_TYPES, "B": FLOAT_TYPES},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
    samples=({}, {"trans_a": 1}, {"trans_b": 1}, {"trans_a": 1, "trans_b": 1, "factors_in_bfloat16": 1}),
    spreads_nan=True,
)
