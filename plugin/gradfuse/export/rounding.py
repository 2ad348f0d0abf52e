"""Measures the effect of rounding in PyTorch: runs a computation with every result of arithmetic moved a little.

If the operands of a comparison, a maximum or a sort lie within rounding of each other, runs that are moved by more than
rounding go either way: a few of them show how far the results may vary. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private

# Without operators that only select or rearrange values: they do not round, and gradients compare their values.
_ARITHMETIC = frozenset(
    """
    add sub rsub mul div reciprocal addcmul addcdiv lerp pow square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc sigmoid logit log_sigmoid_forward
    silu gelu mish elu celu selu softplus hardswish logaddexp sinc hypot
    mm bmm addmm baddbmm addbmm addmv addr mv dot vdot convolution mkldnn_convolution _convolution
    native_batch_norm _native_batch_norm_legit_functional native_layer_norm native_group_norm _fused_rms_norm
    _softmax _log_softmax logsumexp sum mean var std var_mean std_mean norm linalg_vector_norm cumsum prod cumprod
    avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    mse_loss huber_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits
    _softmax_backward_data _log_softmax_backward_data index_add scatter_add scatter_reduce embedding_bag
    """.split()
)
_BACKWARD = "_backward"


NARROW = (torch.float16, torch.bfloat16)
_CONVERSIONS = {
    torch.float32: torch.Tensor.float,
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
}


class WideConversions(TorchFunctionMode):
    """Convert to float64 where code asks for float32, or for one of these types.

    A conversion of float32 to float32 is the tensor itself, and what is written into it is written into both.

    Args:
        types: narrower types that are converted so as well.
    """

    def __init__(self, types: Collection[torch.dtype] = ()) -> None:
        super().__init__()
        self._types = {torch.float32, *types}
        self._functions = {_CONVERSIONS[one] for one in self._types}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._functions:
            func = torch.Tensor.double
        args = [self._wide(one) for one in args]
        named = {key: self._wide(one) for key, one in (kwargs or {}).items()}
        return func(*args, **named)

    def _wide(self, one: Any) -> Any:
        return torch.float64 if isinstance(one, torch.dtype) and one in self._types else one


class WideSparse(TorchFunctionMode):
    """Take sparse matrices as float64 beside dense tensors of it: PyTorch multiplies those of one type alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if any(map(_is_sparse, tensors)) and any(one.dtype == torch.float64 for one in tensors):
            args = [one.double() if _is_sparse(one) else one for one in args]
            kwargs = {key: one.double() if _is_sparse(one) else one for key, one in kwargs.items()}
        return func(*args, **kwargs)


def _is_sparse(one: Any) -> bool:
    return isinstance(one, Tensor) and one.layout != torch.strided and one.is_floating_point()


class Rounding(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Move the results of arithmetic that runs under it, by random relative amounts.

    Whole numbers stay as they are: arithmetic on them does not round.

    Args:
        size: the largest relative amount.
        seed: equal seeds move alike.
        narrow: by how many of their own roundings results of 16 bits are moved, if that is more.
    """

    def __init__(self, size: float, seed: int, narrow: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._size = size
        self._narrow = narrow
        self._generator = torch.Generator().manual_seed(seed)
        self._moving = False

    def moved(self, tensor: Tensor, *, whole: bool = False) -> Tensor:
        """Return a moved copy of a tensor of any type; one that is not floating point as it is.

        Whole numbers stay, unless `whole` says that they move as well, and 0 as if it were 1.
        """
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            return tensor
        self._moving = True
        try:
            amounts = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64)
            size = max(self._size, self._narrow * torch.finfo(tensor.dtype).eps if tensor.dtype in NARROW else 0.0)
            factors = 1.0 + size * (2.0 * amounts - 1.0)
            moved = (tensor * factors.to(tensor.device)).to(tensor.dtype)
            if whole:
                others = tensor + (factors - 1.0).to(tensor.device, tensor.dtype) * tensor.abs().clamp(min=1.0)
                return torch.where(tensor == tensor.round(), others, moved)
            return torch.where(tensor == tensor.round(), tensor, moved)
        finally:
            self._moving = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = private.operator_name(func).removeprefix("aten::")
        if self._moving or private.is_mutable(func) or not (name in _ARITHMETIC or name.endswith(_BACKWARD)):
            return result
        return private.map_tensors(self.moved, result)
