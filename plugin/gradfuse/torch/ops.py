"""The operators as ``torch.ops.aclnn.<stem>``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfuse.custom_ops import DOMAIN, OPS, Operator
from gradfuse.errors import ArgumentError
from gradfuse.torch.calling import Kernel

# Outputs are contiguous whatever the strides of the inputs.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def register_ops() -> None:
    """Register those operators that are not registered yet; they stay for as long as the process runs."""
    for operator in OPS.values():
        if not hasattr(torch.ops.aclnn, operator.stem):
            _register(operator)


def _register(operator: Operator) -> None:
    name, op = f"{DOMAIN}::{operator.stem}", operator.torch_op
    torch.library.define(name, operator.torch_schema, tags=_TAGS)
    kernel = Kernel(operator)
    torch.library.register_kernel(name, ("cpu", "cuda"), kernel)
    torch.library.register_fake(name, kernel.fake)
    torch.library.register_autograd(name, op.backward or _no_derivative(name), setup_context=op.setup_context)
    if op.backward is not None:
        # As PyTorch does it: losses are computed in float32, backward passes in the types that they are given.
        for device_type in ("cpu", "cuda"):
            torch.library.register_autocast(name, device_type, torch.float32)
    torch.library.register_vmap(name, _one_by_one(name, getattr(torch.ops.aclnn, operator.stem).default))


def _no_derivative(name: str) -> Callable[..., None]:
    """A backward that fails as that of PyTorch's own operators without a derivative does."""

    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(f"derivative for {name} is not implemented")

    return backward


def _one_by_one(name: str, op: Callable[..., Tensor | tuple[Tensor, ...]]) -> Callable[..., Any]:
    """A rule for vmap that calls the operator once for each element of the batch."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        if info.batch_size == 0:
            raise ArgumentError(f"{name}: the dimension that vmap is over is of size 0; expected 1 or more")
        # The dimension of what does not vary is None, and of a list a list of them.
        pairs = list(zip(args, in_dims, strict=True))
        calls = [
            op(*(arg.select(dim, index) if isinstance(dim, int) else arg for arg, dim in pairs))
            for index in range(info.batch_size)
        ]
        if isinstance(calls[0], Tensor):
            return _stack(calls), 0
        return tuple(map(_stack, zip(*calls, strict=True))), (0,) * len(calls[0])

    return rule


def _stack(results: Sequence[Any]) -> Tensor:
    """Stack results; a log_alpha that has fewer states than others gets more, which are -inf as unused ones are."""
    if len({result.shape for result in results}) > 1:
        width = max(result.shape[-1] for result in results)
        results = [torch.nn.functional.pad(r, (0, width - r.shape[-1]), value=-torch.inf) for r in results]
    return torch.stack(tuple(results))
