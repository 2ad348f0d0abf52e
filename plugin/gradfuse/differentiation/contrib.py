"""Operators of gradfuse's own domain and of onnxruntime's."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradfuse.differentiation.elementwise import tanh_gelu_slope
from gradfuse.differentiation.rules import Call, Gradient, gradient
from gradfuse.differentiation.tensors import Tensor, normal_density

_MICROSOFT = "com.microsoft"


@gradient("CtcLoss", domain="aclnn")
def ctc_loss(call: Call) -> Iterator[Gradient]:
    """CtcLossBackward takes the gradient through the softmax along: of the logits, as `aten::_ctc_loss_backward`."""
    dy = call.dy[0]
    if dy is None or (len(call.dy) > 1 and call.dy[1] is not None):
        raise call.error("the result depends on log_alpha; expected on the losses only")
    options = {name: call.attribute(name, 0) for name in ("blank", "zero_infinity")}
    yield call.tape.op("CtcLossBackward", dy, *call.x[:4], *call.y[:2], domain="aclnn", **options)


@gradient("Gelu", domain=_MICROSOFT)
def gelu(call: Call) -> Iterator[Gradient]:
    x, dy = _operands(call)
    yield dy * gelu_slope(x)


@gradient("FastGelu", domain=_MICROSOFT)
def fast_gelu(call: Call) -> Iterator[Gradient]:
    x, dy = _operands(call)
    bias = call.input(1)
    inner = x if bias is None else x + bias
    slope = dy * tanh_gelu_slope(inner)
    yield slope
    if bias is not None:
        yield lambda: call.summed_to(slope, bias, call.y[0])


@gradient("BiasGelu", domain=_MICROSOFT)
def bias_gelu(call: Call) -> Iterator[Gradient]:
    x, dy = _operands(call)
    bias = call.x[1]
    assert bias is not None
    slope = dy * gelu_slope(x + bias)
    yield slope
    yield lambda: call.summed_to(slope, bias, call.y[0])


@gradient("QuickGelu", domain=_MICROSOFT)
def quick_gelu(call: Call) -> Iterator[Gradient]:
    """x sigmoid(alpha x)."""
    x, dy = _operands(call)
    alpha = call.attribute("alpha", 1.702)
    s = (x * alpha).sigmoid()
    yield dy * (s + x * alpha * s * (1 - s))


def gelu_slope(x: Tensor) -> Tensor:
    """The derivative of x Phi(x)."""
    return ((x * (1 / math.sqrt(2))).op("Erf") + 1) * 0.5 + x * normal_density(x)


def _operands(call: Call) -> tuple[Tensor, Tensor]:
    x, dy = call.x[0], call.dy[0]
    assert x is not None and dy is not None
    return x, dy
