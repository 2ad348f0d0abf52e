"""Complex numbers as two real tensors: rotary embeddings by `torch.polar`, `torch.view_as_complex` and similar
functions.

What computes complex numbers becomes `complex(real part, imaginary part)` of real computations, and what reads the
parts reads these. Fourier transforms stay what they are. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.export import ExportedProgram

from gradfuse import _torch_private as private
from gradfuse.export.standins import STOP_GRADIENT

aten = torch.ops.aten

_Number: TypeAlias = "Tensor | complex"
_Parts: TypeAlias = "tuple[Any, Any]"
_MOST_FACTORS = 4
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

_LINEAR = (
    aten.alias.default, aten.cat.default, aten.clone.default, aten.cumsum.default,
    aten.detach.default, aten.expand.default, aten.flip.default, aten.gather.default, aten.index.Tensor,
    aten.index_select.default, aten.mean.default, aten.mean.dim, aten.neg.default, aten.permute.default,
    aten.repeat.default, aten.reshape.default, aten.roll.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.stack.default,
    aten.sum.default, aten.sum.dim_IntList, aten.t.default, aten.transpose.int, aten.unbind.int, aten.unsqueeze.default,
    aten.view.default, aten._unsafe_view.default, STOP_GRADIENT,
)  # fmt: skip
"""What does the same to both parts of its first argument, a tensor or a list of them."""
_JOINED = {
    aten.copy.default: (0, 1),
    aten.index_copy.default: (0, 3),
    aten.index_put.default: (0, 2),
    aten.masked_fill.Scalar: (0, 2),
    aten.masked_fill.Tensor: (0, 2),
    aten.select_scatter.default: (0, 1),
    aten.slice_scatter.default: (0, 1),
    aten.where.self: (1, 2),
}
"""What does the same to both parts of the numbers at these places among its arguments."""


def table(others: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them.

    Args:
        others: those of the same operators of real numbers.
    """
    of_complex: dict[Any, Callable[..., Any]] = {
        **{overload: _by_parts(overload) for overload in _LINEAR},
        **{overload: _by_parts_of(overload, places) for overload, places in _JOINED.items()},
        aten.constant_pad_nd.default: _pad,
        aten.full.default: _filled(aten.full.default),
        aten.full_like.default: _filled(aten.full_like.default),
        aten.add.Tensor: lambda a, b, alpha=1: _sum(a, b, alpha),
        aten.sub.Tensor: lambda a, b, alpha=1: _sum(a, b, -alpha),
        aten.rsub.Scalar: lambda a, b, alpha=1: _sum(b, a, -alpha),
        aten.mul.Tensor: _bilinear(lambda a, b: a * b),
        aten.mul.Scalar: _bilinear(lambda a, b: a * b),
        aten.mm.default: _bilinear(torch.mm),
        aten.bmm.default: _bilinear(torch.bmm),
        aten.div.Tensor: _quotient,
        aten.div.Scalar: _quotient,
        aten.reciprocal.default: lambda a: _quotient(1.0, a),
        aten.pow.Tensor_Scalar: _power,
        aten.exp.default: _exp,
        aten._conj.default: _conjugate,
        aten._conj_physical.default: _conjugate,
        aten.conj_physical.default: _conjugate,
        aten._to_copy.default: _to_copy,
        torch.ops.prims.convert_element_type.default: lambda a, dtype: _to_copy(a, dtype=dtype),
    }
    return {
        aten.polar.default: lambda abs, angle: torch.complex(abs * angle.cos(), abs * angle.sin()),
        aten.view_as_complex.default: lambda self: torch.complex(self.select(-1, 0), self.select(-1, 1)),
        **{overload: _chosen(rule, others.get(overload)) for overload, rule in of_complex.items()},
    }


def read_parts(program: ExportedProgram) -> None:
    """Let what reads the parts of `complex(a, b)` in a decomposed program read `a` and `b`."""
    graph = program.graph
    changed = False
    for node in list(graph.nodes):
        if node.target is not aten.view_as_real.default or node.args[0].target is not aten.complex.default:
            continue
        whole = node.args[0]
        if any(part.meta["val"].shape != whole.meta["val"].shape for part in whole.args):
            continue
        changed = True
        last = node.meta["val"].dim() - 1
        for user in list(node.users):
            if user.target is aten.select.int and user.args[1] in (-1, last):
                user.replace_all_uses_with(whole.args[user.args[2]])
        with graph.inserting_before(node):
            both = graph.call_function(aten.stack.default, (list(whole.args), -1))
        both.meta = dict(node.meta)
        node.replace_all_uses_with(both)
    if changed:
        graph.eliminate_dead_code()
        graph.lint()
        program.graph_module.recompile()


def _chosen(rule: Callable[..., Any], other: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a decomposition that is `rule` where an argument is complex, or a type; else `other`."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        leaves = private.tensors_in((args, kwargs))
        if any(_is_complex(one) or (isinstance(one, torch.dtype) and one in _REAL) for one in leaves):
            return rule(*args, **kwargs)
        return NotImplemented if other is None else other(*args, **kwargs)

    return decompose


def _is_complex(value: Any) -> bool:
    return value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)


def _parts(value: _Number) -> _Parts:
    """Return real and imaginary part; of a real number, the second is 0."""
    if private.is_symbolic(value):
        return value, 0.0
    if not isinstance(value, Tensor):
        return complex(value).real, complex(value).imag
    if not value.is_complex():
        return value, 0.0
    pair = torch.view_as_real(value)
    return pair.select(-1, 0), pair.select(-1, 1)


def _of(real: Any, imaginary: Any) -> Tensor:
    return torch.complex(*torch.broadcast_tensors(real, imaginary))  # type: ignore[no-untyped-call]


def _by_parts(overload: Any) -> Callable[..., Any]:
    def decompose(first: Any, *args: Any, **kwargs: Any) -> Any:
        listed = isinstance(first, (list, tuple))
        pairs = [_parts(one) for one in (first if listed else (first,))]
        pairs = [(a, torch.zeros_like(a) if isinstance(b, float) else b) for a, b in pairs]
        both = ([part[which] for part in pairs] for which in range(2))
        real, imaginary = (overload(part if listed else part[0], *args, **kwargs) for part in both)
        if isinstance(real, Tensor):
            return torch.complex(real, imaginary)
        return [torch.complex(a, b) for a, b in zip(real, imaginary, strict=True)]

    return decompose


def _by_parts_of(overload: Any, places: Sequence[int]) -> Callable[..., Any]:
    def decompose(*args: Any, **kwargs: Any) -> Tensor:
        pairs = {place: _parts(args[place]) for place in places}
        both = []
        for which in range(2):
            given = list(args)
            for place, pair in pairs.items():
                zeros = which == 1 and isinstance(pair[0], Tensor) and not isinstance(pair[1], Tensor)
                given[place] = torch.zeros_like(pair[0]) if zeros else pair[which]
            both.append(overload(*given, **kwargs))
        return torch.complex(*both)

    return decompose


def _sum(a: _Number, b: _Number, factor: float) -> Tensor:
    (re, im), (other_re, other_im) = _parts(a), _parts(b)
    return _of(re + factor * other_re, im + factor * other_im)


def _bilinear(product: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    def decompose(a: _Number, b: _Number) -> Tensor:
        (re, im), (other_re, other_im) = _parts(a), _parts(b)
        if not _is_complex(b):
            return torch.complex(product(re, other_re), product(im, other_re))
        if not _is_complex(a):
            return torch.complex(product(re, other_re), product(re, other_im))
        return torch.complex(
            product(re, other_re) - product(im, other_im), product(re, other_im) + product(im, other_re)
        )

    return decompose


def _quotient(a: _Number, b: _Number) -> Tensor:
    (re, im), (other_re, other_im) = _parts(a), _parts(b)
    if not _is_complex(b):
        return torch.complex(re / other_re, im / other_re)
    size = other_re * other_re + other_im * other_im
    return _of((re * other_re + im * other_im) / size, (im * other_re - re * other_im) / size)


def _power(self: Tensor, exponent: Any) -> Any:
    factors = next((count for count in range(1, _MOST_FACTORS + 1) if count == exponent), None)
    if factors is None:
        return NotImplemented
    result = self
    for _ in range(factors - 1):
        result = result * self
    return result


def _pad(self: Tensor, pad: Any, value: complex = 0) -> Tensor:
    ends = complex(value).real, complex(value).imag
    return torch.complex(*(aten.constant_pad_nd(part, pad, end) for part, end in zip(_parts(self), ends, strict=True)))


def _filled(overload: Any) -> Callable[..., Any]:
    def decompose(like: Any, value: complex, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
        if isinstance(like, Tensor):
            dtype = dtype or like.dtype
            like = like.real if like.is_complex() else like
        if dtype not in _REAL:
            return overload(like, value, dtype=dtype, **options)
        parts = (overload(like, part, dtype=_REAL[dtype], **options) for part in _parts(value))
        return torch.complex(*parts)

    return decompose


def _exp(self: Tensor) -> Tensor:
    re, im = _parts(self)
    return torch.polar(re.exp(), im)


def _conjugate(self: Tensor) -> Tensor:
    re, im = _parts(self)
    return torch.complex(re, -im)


def _to_copy(self: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    options.pop("memory_format", None)
    re, im = _parts(self)
    if dtype is not None and dtype not in _REAL:
        return re.to(dtype)  # type: ignore[no-any-return]
    dtype = None if dtype is None else _REAL[dtype]
    real = re.to(dtype=dtype, **options)
    return torch.complex(real, im.to(dtype=dtype, **options) if isinstance(im, Tensor) else torch.zeros_like(real))
