"""Derivatives that a step takes itself, by `torch.autograd.grad` or `torch.func`, as operators of its forward pass.

Such a step is traced twice. First below autograd: there the backward passes inside the step are operators like all
others, with PyTorch's own formulas. What comes of it is then traced like any module, and the rules differentiate the
whole. The second trace knows nothing of `detach` and `no_grad` any more, nor that `torch.autograd.grad` without
`create_graph` gives constants; so the first one marks every result that, as autograd says, has no gradient although
an argument has one. This module imports torch.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.export import standins
from gradfuse.export.in_vmap import normalised, scaled
from gradfuse.export.reporting import refusal

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)


class _Stopped(torch.autograd.Function):
    """Marks a tensor within functions of torch.func; the gradients that these take go on."""

    @staticmethod
    def forward(input: Tensor) -> Tensor:
        stopped: Tensor = standins.STOP_GRADIENT(input)
        return stopped

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], input: Tensor) -> tuple[Any, int]:
        return _stopped(input), in_dims[0]


_stopped: Any = _Stopped.apply


def traced(
    function: Callable[..., Any], state: Mapping[str, Tensor], trainable: Collection[str], *others: Sequence[Tensor]
) -> Any:
    """Return what a function of tensors gives while it is traced, in operators below autograd.

    Args:
        function: takes the tensors as they are given here, and derivatives inside; it returns nested tensors.
        state: parameters and buffers.
        trainable: the names of those that require gradients.
        others: more tensors.
    """
    values, put_together = private.flattened((dict(state), *map(list, others)))
    structure: list[Callable[[Sequence[Any]], Any]] = []

    def marked(*leaves: Tensor) -> tuple[Tensor, ...]:
        kernel, batched = sdpa_kernel(SDPBackend.MATH), private.gradients_batched_by_vmap()
        with torch.enable_grad(), kernel, batched, private.forward_mode_by_reverse(), rules_of_vmap(), _Marked(leaves):
            results, back = private.flattened(function(*put_together(leaves)))
        structure.append(back)
        return tuple(results)

    differentiable = [name in trainable for name in state] + [False] * (len(values) - len(state))
    module = private.below_autograd(marked, values, differentiable)
    _refuse_known_sizes(module.graph)
    for node in list(module.graph.nodes):
        # Autograd makes them of what it saves; the user's are marked.
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    with private.gradients_off_unseen():
        return structure[-1](module(*values))


def _refuse_known_sizes(graph: torch.fx.Graph) -> None:
    """Refuse a trace in which a rule of `vmap` has made a size that may vary a constant."""
    asked = False
    for node in graph.nodes:
        if asked and private.is_operator(node.target) and node.target is not aten.size.default:
            raise refusal(
                f"{node.target} within vmap takes sizes that are known alone, but an axis may vary as dynamic_shapes "
                "says; expected other operators there, or this axis static"
            )
        asked = asked or node.target is aten.size.default


@contextlib.contextmanager
def rules_of_vmap() -> Iterator[None]:
    """Let `vmap` batch operators at sizes that may vary, where PyTorch's own rules take known ones alone."""
    with private.batched_by({operator.attrgetter(name)(aten): rule for name, rule in _RULES.items()}):
        yield


def _first(tensor: Tensor, place: int | None, size: Any) -> Tensor:
    """Return a tensor with the batch as its first axis, repeated if it has none."""
    return tensor.unsqueeze(0).expand([size, *tensor.shape]) if place is None else tensor.movedim(place, 0)


def _all_first(tensors: Sequence[Tensor], places: Sequence[int | None]) -> list[Tensor]:
    size = next(one.shape[place] for one, place in zip(tensors, places, strict=True) if place is not None)
    return [_first(one, place, size) for one, place in zip(tensors, places, strict=True)]


def _behind_batch(dim: int, rank: int) -> int:
    """Return which axis of tensors with a batch an axis of tensors of a rank is."""
    return dim % max(rank, 1) + 1


def _cat(info: Any, in_dims: Any, tensors: Sequence[Tensor], dim: int = 0) -> tuple[Tensor, int]:
    rows = _all_first(tensors, in_dims[0])
    # PyTorch joins empty vectors with anything.
    rows = [one for one in rows if one.dim() != 2 or one.shape[1] != 0] or rows
    return torch.cat(rows, _behind_batch(dim, rows[0].dim() - 1)), 0


def _slice_backward(
    info: Any, in_dims: Any, grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> tuple[Tensor, int]:
    rows = grad.movedim(in_dims[0], 0)
    dim = _behind_batch(dim, len(sizes))
    return aten.slice_backward(rows, [rows.shape[0], *sizes], dim, start, end, step), 0


def _diagonal_backward(
    info: Any, in_dims: Any, grad: Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> tuple[Tensor, int]:
    rows = grad.movedim(in_dims[0], 0)
    dims = (_behind_batch(dim, len(sizes)) for dim in (dim1, dim2))
    return aten.diagonal_backward(rows, [rows.shape[0], *sizes], offset, *dims), 0


def _constant_pad_nd(
    info: Any, in_dims: Any, input: Tensor, pad: Sequence[int], value: float = 0
) -> tuple[Tensor, int]:
    return aten.constant_pad_nd(input.movedim(in_dims[0], 0), pad, value), 0


def _index_select(info: Any, in_dims: Any, input: Tensor, dim: int, index: Tensor) -> tuple[Tensor, int]:
    axis = _behind_batch(dim, input.dim() - (in_dims[0] is not None))
    if in_dims[2] is None:
        return torch.index_select(input.movedim(in_dims[0], 0), axis, index), 0
    rows, places = _all_first((input, index), (in_dims[0], in_dims[2]))
    return torch.gather(rows, axis, _spread(places, rows, axis)), 0


def _index_add(
    info: Any, in_dims: Any, input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> tuple[Tensor, int]:
    axis = _behind_batch(dim, input.dim() - (in_dims[0] is not None))
    rows, places, added = _all_first((input, index, source), (in_dims[0], in_dims[2], in_dims[3]))
    if in_dims[2] is None:
        return torch.index_add(rows, axis, index, added, alpha=alpha), 0
    return torch.scatter_add(rows, axis, _spread(places, added, axis), added * alpha), 0


def _spread(places: Tensor, rows: Tensor, axis: int) -> Tensor:
    """Return the indices of an axis, by item of the batch, for each element of the other axes."""
    shape = [rows.shape[0] if one == 0 else -1 if one == axis else 1 for one in range(rows.dim())]
    sizes = [places.shape[1] if one == axis else size for one, size in enumerate(rows.shape)]
    return places.reshape(shape).expand(sizes)


def _gather(
    info: Any, in_dims: Any, input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False
) -> tuple[Tensor, int]:
    rows, places = _all_first((input, index), (in_dims[0], in_dims[2]))
    return torch.gather(rows, _behind_batch(dim, rows.dim() - 1), places), 0


def _scatter_add(info: Any, in_dims: Any, input: Tensor, dim: int, index: Tensor, src: Tensor) -> tuple[Tensor, int]:
    rows, places, added = _all_first((input, index, src), (in_dims[0], in_dims[2], in_dims[3]))
    return torch.scatter_add(rows, _behind_batch(dim, rows.dim() - 1), places, added), 0


def _scatter(info: Any, in_dims: Any, input: Tensor, dim: int, index: Tensor, value: Any) -> tuple[Tensor, int]:
    """Scatter numbers of a tensor or a single number, as the gradient of `nll_loss` does."""
    if not isinstance(value, Tensor):
        rows, places = _all_first((input, index), (in_dims[0], in_dims[2]))
    else:
        rows, places, value = _all_first((input, index, value), (in_dims[0], in_dims[2], in_dims[3]))
    return torch.scatter(rows, _behind_batch(dim, rows.dim() - 1), places, value), 0


_RULES: Mapping[str, Callable[..., Any]] = {
    "cat": _cat,
    "constant_pad_nd": _constant_pad_nd,
    "diagonal_backward": _diagonal_backward,
    "gather": _gather,
    "index_add": _index_add,
    "index_select": _index_select,
    "scatter.src": _scatter,
    "scatter.value": _scatter,
    "scatter_add": _scatter_add,
    "slice_backward": _slice_backward,
}
"""Operator or overload -> its rule, as `torch.library.register_vmap` takes it."""


class _Marked(TorchFunctionMode):
    """Marks results without a gradient, and calls some functions in plain operators.

    Args:
        leaves: tensors of the trace; those that require gradients are marked where code freezes them meanwhile.
    """

    def __init__(self, leaves: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._trained = {id(one) for one in leaves if one.requires_grad}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "detach_":
            raise refusal(
                "the step calls detach_() beside derivatives of its own, which cannot be traced; expected detach()"
            )
        if name not in _ABOUT_TENSORS and not name.endswith("_"):
            args, kwargs = private.map_tensors(self._frozen, (args, kwargs))
        # PyTorch's own kernels of attention, which a step may ask for, have gradients that ONNX cannot say.
        kernel = sdpa_kernel(SDPBackend.MATH) if func in _ATTENTION else contextlib.nullcontext()
        with kernel:
            result = _INSTEAD.get(func, func)(*args, **kwargs)
        given = [one for one in private.tensors_in((args, kwargs)) if isinstance(one, Tensor)]
        if not any(private.innermost(one).requires_grad for one in given):
            return result
        known = {id(one) for one in given}

        def mark(tensor: Tensor) -> Tensor:
            if id(tensor) in known or not tensor.is_floating_point() or private.innermost(tensor).requires_grad:
                return tensor
            marked: Tensor = (_stopped if private.is_wrapped(tensor) else standins.STOP_GRADIENT)(tensor)
            return marked

        return private.map_tensors(mark, result)

    def _frozen(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._trained or tensor.requires_grad:
            return tensor
        stopped: Tensor = standins.STOP_GRADIENT(tensor)
        return stopped


_ATTENTION = frozenset((F.scaled_dot_product_attention, F.multi_head_attention_forward))

_ABOUT_TENSORS = frozenset(("__get__", "__set__", "__setitem__", "grad", "is_floating_point", "dim", "size"))
"""Functions that ask for something of a tensor, or write into it; so do those whose names end in an underscore."""


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise as `torch.nn.functional.batch_norm` does; kernels write statistics where no trace sees it."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    x = input.float() if input.dtype in _NARROW else input
    axes = [axis for axis in range(input.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(input.dim())]
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    variance = centred.square().mean(axes, keepdim=True)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        for running, now in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            still = standins.STOP_GRADIENT(now.detach()).reshape(-1).to(running.dtype)
            running.mul_(1.0 - momentum).add_(still * momentum)
    return scaled(centred * torch.rsqrt(variance + eps), weight, bias, shape).to(input.dtype)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """The same for each item by itself."""
    if not use_input_stats or running_mean is not None:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    x = input.float() if input.dtype in _NARROW else input
    axes = list(range(2, input.dim()))
    return scaled(normalised(x, axes, eps), weight, bias, [1, -1, *[1 for _ in axes]]).to(input.dtype)


_INSTEAD: Mapping[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
}

FUNCTIONS = (_Stopped,)
"""The functions with a backward pass that take part in it."""
