"""Functions of single elements that ONNX has no operators for. This module imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private

aten = torch.ops.aten


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        aten.add.Tensor: add,
        aten.clamp.Tensor: clamp,
        aten.clamp_min.Tensor: clamp,
        aten.clamp_max.Tensor: clamp_max,
        aten.fmax.default: fmax,
        aten.fmin.default: fmin,
        aten.signbit.default: signbit,
        aten.copysign.Tensor: copysign,
        aten.copysign.Scalar: copysign,
        aten.frexp.Tensor: frexp,
        aten.where.self: where,
    }


def by_sizes(others: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of operators with numbers that follow from sizes, by overload.

    Args:
        others: those of the same operators with other numbers.
    """
    functions: dict[Any, Callable[..., Any]] = {
        aten.hardtanh.default: hardtanh,
        aten.pow.Tensor_Scalar: power,
        aten.remainder.Scalar: _with_tensor(torch.remainder),
        aten.bitwise_and.Scalar: _with_tensor(torch.bitwise_and),
        aten.bitwise_or.Scalar: _with_tensor(torch.bitwise_or),
        aten.bitwise_xor.Scalar: _with_tensor(torch.bitwise_xor),
    }
    return {overload: _of_symbols(function, others.get(overload)) for overload, function in functions.items()}


def _of_symbols(function: Callable[..., Any], other: Callable[..., Any] | None) -> Callable[..., Any]:
    def decompose(*args: Any, **kwargs: Any) -> Any:
        if any(map(private.is_symbolic, (*args, *kwargs.values()))):
            return function(*args, **kwargs)
        return NotImplemented if other is None else other(*args, **kwargs)

    return decompose


def add(self: Tensor, other: Any, *, alpha: Any = 1) -> Any:
    """aten::add of two masks, whose sum is a mask: where one of them is."""
    if not all(isinstance(one, Tensor) and one.dtype == torch.bool for one in (self, other)):
        return NotImplemented
    return self.logical_or(other) if alpha else self.clone()


def clamp(self: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Any:
    """aten::clamp between tensors: at a bound its gradient is that of `self`.

    torch.onnx translates it as `Max` and `Min`, in which equal numbers share the gradient.
    """
    if not self.is_floating_point():
        return NotImplemented
    result = self if min is None else torch.where(self < min, min, self)
    # If the bounds are in the wrong order, PyTorch gives the upper one.
    return result if max is None else torch.where(result > max, max, result)


def clamp_max(self: Tensor, max: Tensor) -> Any:
    """aten::clamp_max by a tensor."""
    return clamp(self, None, max)


def fmax(self: Tensor, other: Tensor) -> Tensor:
    """aten::fmax: the larger number, or the one beside a NaN. Of equal ones the first gets the gradient."""
    return torch.where((self >= other) | other.isnan(), self, other)


def fmin(self: Tensor, other: Tensor) -> Tensor:
    """aten::fmin, likewise."""
    return torch.where((self <= other) | other.isnan(), self, other)


def hardtanh(self: Tensor, min_val: Any = -1, max_val: Any = 1) -> Any:
    """aten::hardtanh between numbers that follow from sizes: at a bound it has no gradient."""
    least, most = (torch.scalar_tensor(bound, dtype=self.dtype) for bound in (min_val, max_val))
    return torch.where(self <= least, least, torch.where(self >= most, most, self))


def power(self: Tensor, exponent: Any) -> Any:
    """aten::pow with an exponent that follows from sizes."""
    return self.pow(torch.scalar_tensor(exponent, dtype=self.dtype))


def _with_tensor(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """Return an operator with a number that follows from sizes, as the same with a tensor of shape ()."""

    def with_tensor(self: Tensor, other: Any) -> Tensor:
        is_whole = isinstance(other, torch.SymInt) and not self.is_floating_point()
        floating = self.dtype if self.is_floating_point() else torch.get_default_dtype()
        return function(self, torch.scalar_tensor(other, dtype=torch.int64 if is_whole else floating))

    return with_tensor


def where(condition: Tensor, self: Tensor, other: Tensor) -> Any:
    """aten::where of masks, and of bfloat16, for which onnxruntime has no kernel."""
    if self.dtype == other.dtype == torch.bool:
        return (condition & self) | (~condition & other)
    if self.dtype == other.dtype == torch.bfloat16:
        return torch.where(condition, self.float(), other.float()).to(self.dtype)
    return NotImplemented


def signbit(self: Tensor) -> Tensor:
    """aten::signbit: whether a number is negative, or -0. A NaN is taken to have no sign."""
    if not self.is_floating_point():
        return self < 0
    return torch.where(self == 0, self.reciprocal(), self) < 0


def copysign(self: Tensor, other: Tensor | float) -> Tensor:
    """aten::copysign: the size of one number with the sign of the other. At 0 it has no gradient."""
    size = self.abs()
    if not isinstance(other, Tensor):
        other = torch.full((), other, dtype=torch.float64, device=self.device)
    if not size.is_floating_point():
        size = size.to(torch.get_default_dtype())
    return torch.where(signbit(other), -size, size)


def frexp(self: Tensor) -> tuple[Tensor, Tensor]:
    """aten::frexp: m and e of x = m 2^e with 1/2 <= |m| < 1; an infinity or a NaN is its own m."""
    x = self.double()
    plain = (x != 0) & x.isfinite()
    # The logarithm may be rounded over a whole number.
    exponent = torch.where(plain, x, 0.5).abs().log2().floor() + 1.0
    size = (torch.where(plain, x, 0.5) * (-exponent).exp2()).abs()
    exponent = exponent + (size >= 1.0).to(x.dtype) - (size < 0.5).to(x.dtype)
    exponent = torch.where(plain, exponent, 0.0)
    # Half of the power twice: that of the smallest numbers is no number of their type.
    half = (exponent * -0.5).floor()
    mantissa = self * half.exp2().to(self.dtype) * (-exponent - half).exp2().to(self.dtype)
    return mantissa, exponent.to(torch.int32)
