"""Logarithms of sums of exponentials and what is made of them, with the digits of results near 0.

The loss of a batch that is classified with confidence is such a result: log(1 + exp(-x)) for a large x. This module
imports torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from gradfuse.export import standins

aten = torch.ops.aten

_MEAN, _SUM = 1, 2
"""ATen's numbers of reductions."""

_LEAST_LOGARITHM = -100.0
_LEAST_VARIANCE = 9.999999960041972e-13
"""1e-12 in float32, in which PyTorch writes it."""

_FLAT = 200.0
"""Beyond it, a sigmoid is 0 or 1 in float32, and its slope 0."""

_MEASURES = frozenset(
    (
        *(aten.binary_cross_entropy, aten.log, aten.log1p, aten.log2, aten.log10, aten.mse_loss, aten.rsub),
        *(aten.xlogy, aten.sum, aten.mean),
    )
)
"""What small probabilities matter to, as the loss of a confident batch consists of them."""
_VIEWS = frozenset(
    (
        *(aten.squeeze, aten.unsqueeze, aten.view, aten.reshape, aten.flatten, aten.neg, aten.permute),
        *(aten.expand, aten.broadcast_tensors),
    )
)

_library: Any = torch.library.Library("gradfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("exact_sigmoid(Tensor self) -> Tensor")
torch.library.register_fake("gradfuse::exact_sigmoid", torch.empty_like, lib=_library)
_library.impl("exact_sigmoid", torch.sigmoid, "CompositeExplicitAutograd")
_EXACT_SIGMOID = torch.ops.gradfuse.exact_sigmoid.default


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        aten.softplus.default: softplus,
        aten.logsumexp.default: logsumexp,
        aten.log_sigmoid_forward.default: log_sigmoid,
        aten.binary_cross_entropy.default: binary_cross_entropy,
        aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
        aten.logaddexp.default: logaddexp,
        aten.logaddexp2.default: logaddexp2,
        aten.logcumsumexp.default: logcumsumexp,
        _EXACT_SIGMOID: sigmoid,
    }


def choose_sigmoids(program: ExportedProgram) -> None:
    """Let those sigmoids of a traced program that a loss reads have the digits of small results.

    onnxruntime's have seven digits behind the point, which is 0 from -18 on.
    """
    trained: set[Node] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        is_parameter = node.op == "placeholder" and isinstance(value, Tensor) and value.requires_grad
        if is_parameter or any(one in trained for one in node.all_input_nodes):
            trained.add(node)
    for node in program.graph.nodes:
        if node.target is aten.sigmoid.default and _is_measured(node, trained):
            node.target = _EXACT_SIGMOID


def _is_measured(node: Node, trained: Collection[Node]) -> bool:
    pending, seen = list(node.users), set(node.users)
    while pending:
        user = pending.pop()
        packet = getattr(user.target, "overloadpacket", None)
        # What is weighted by numbers that do not train is no gate.
        weighted = packet is aten.mul and sum(one in trained for one in user.all_input_nodes) == 1
        if packet in _MEASURES or (weighted and len(user.all_input_nodes) > 1):
            return True
        if packet in _VIEWS or user.target is operator.getitem:
            pending.extend(one for one in user.users if one not in seen)
            seen.update(user.users)
    return False


def sigmoid(self: Tensor) -> Tensor:
    """aten::sigmoid, with the digits of what is nearly 0.

    The slope is p (1 - p) of the rounded p, as PyTorch's: losses divide by the same, where another 1 - p would make
    confident numbers explode.
    """
    fixed = standins.STOP_GRADIENT(self)
    right, left = _sides(fixed)
    small = left.exp()
    p = torch.where(fixed >= 0, 1.0 / (1.0 + (-right).exp()), small / (1.0 + small))
    # The difference of what is infinite is no number.
    near = self.clamp(-_FLAT, _FLAT)
    moved: Tensor = near - standins.STOP_GRADIENT(near)
    return p + moved * ((1.0 - p) * p)


def softplus(self: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """aten::softplus: log(1 + exp(beta x)) / beta, and x itself beyond the threshold."""
    scaled = self * beta
    beyond = scaled > threshold
    return torch.where(beyond, self, torch.where(beyond, 0.0, scaled).exp().log1p() / beta)


def log_sigmoid(self: Tensor) -> tuple[Tensor, Tensor]:
    """aten::log_sigmoid_forward: the logarithm, and a buffer that gradients alone read."""
    right, left = _sides(self)
    return torch.where(self >= 0, -(-right).exp().log1p(), left - left.exp().log1p()), self.new_zeros((0,))


def binary_cross_entropy_with_logits(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """aten::binary_cross_entropy_with_logits, in which no two large numbers cancel on either side of 0."""
    right, left = _sides(self)
    positive = target if pos_weight is None else target * pos_weight
    both = 1.0 if pos_weight is None else 1.0 - target + positive
    losses = torch.where(
        self >= 0,
        (1.0 - target) * right + both * (-right).exp().log1p(),
        both * left.exp().log1p() - positive * left,
    )
    return _reduced(losses, weight, reduction)


def binary_cross_entropy(self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN) -> Tensor:
    """aten::binary_cross_entropy: logarithms are at least -100, and the slope is (p - y) / max(p (1 - p), 1e-12)."""
    fixed = standins.STOP_GRADIENT(self)
    of_one, of_none = (one.clamp(min=_LEAST_LOGARITHM) for one in (fixed.log(), (-fixed).log1p()))
    slope = (fixed - standins.STOP_GRADIENT(target)) / ((1.0 - fixed) * fixed).clamp(min=_LEAST_VARIANCE)
    losses = (target - 1.0) * of_none - target * of_one + (self - fixed) * slope
    return _reduced(losses, weight, reduction)


def _reduced(losses: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    if weight is not None:
        losses = losses * weight
    return losses.mean() if reduction == _MEAN else losses.sum() if reduction == _SUM else losses


def _sides(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x where it is at least 0, and x where it is less, each with 0 elsewhere: no exponential is large."""
    return torch.where(x >= 0, x, 0.0), torch.where(x >= 0, 0.0, x)


def logaddexp(self: Tensor, other: Tensor) -> Tensor:
    """aten::logaddexp: log(exp(a) + exp(b)) from the larger one, and how far the other is below it."""
    return _added(self, other, torch.Tensor.exp, torch.Tensor.log1p)


def logaddexp2(self: Tensor, other: Tensor) -> Tensor:
    """aten::logaddexp2: the same to the base 2."""
    return _added(self, other, torch.Tensor.exp2, lambda x: x.log1p() / math.log(2.0))


def logcumsumexp(self: Tensor, dim: int) -> Tensor:
    """aten::logcumsumexp: each element and those before it, in pieces of twice the length each time.

    torch.onnx sums up the exponentials below the largest of all elements, of which small ones ahead of it are 0.
    """
    if self.dim() == 0:
        return self.clone()
    size = self.shape[dim]
    if isinstance(size, int):
        x, step = self.clone(), 1
        while step < size:
            longer = logaddexp(x.narrow(dim, step, size - step), x.narrow(dim, 0, size - step))
            x = torch.cat([x.narrow(dim, 0, step), longer], dim)
            step *= 2
        return x
    # The number of pieces is not known: one sum of all elements up to each.
    x = self.movedim(dim, -1)
    places = torch.arange(size, device=x.device)
    counted = places.unsqueeze(0) <= places.unsqueeze(1)
    return torch.where(counted, x.unsqueeze(-2), -torch.inf).logsumexp(-1).movedim(-1, dim)


def logsumexp(self: Tensor, dim: Sequence[int], keepdim: bool = False) -> Any:
    """aten::logsumexp of floats, with the gradient of a softmax.

    PyTorch's decomposition gives the largest element a gradient of its own, which is nothing but rounding.
    """
    axes = sorted({axis % self.dim() for axis in dim}) if self.dim() else []
    sizes = [self.shape[axis] for axis in axes]
    if not axes or not self.is_floating_point() or any(isinstance(size, int) and size == 0 for size in sizes):
        return NotImplemented
    result = standins.LOG_SUM_EXP(self, axes)
    return result if keepdim else result.squeeze(axes)


def _added(a: Tensor, b: Tensor, power: Callable[[Tensor], Tensor], logarithm: Callable[[Tensor], Tensor]) -> Tensor:
    difference = a - b
    # Of two equal infinities, either is the result.
    apart = torch.where(a == b, torch.where(a.isinf(), 0.0, difference), difference)
    right, left = _sides(apart)
    return torch.where(apart >= 0, a + logarithm(power(-right)), b + logarithm(power(left)))
