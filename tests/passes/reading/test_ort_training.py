"""The readers of operators of onnxruntime-training, one node at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from evaluation import Array
from reader_samples import Dim, Operand, Sample, below, compare, ints, positive, scalar, shape, x

from gradfuse.passes.reading import ort_training

# Stock onnxruntime does not have these operators: what they compute, in numpy.


def _softmax_grad(grad: Array, y: Array, axis: int = -1) -> Array:
    return np.asarray(y * (grad - np.sum(y * grad, axis, keepdims=True)))


def _log_softmax_grad(grad: Array, y: Array, axis: int = -1) -> Array:
    return np.asarray(grad - np.exp(y) * np.sum(grad, axis, keepdims=True))


def _loss_grad(
    grad: Array, logp: Array, t: Array, w: Array | None = None, reduction: str = "mean", ignore_index: int = -1
) -> Array:
    result = np.zeros_like(logp)
    own = np.ones(logp.shape[1]) if w is None else w
    total = sum(own[c] for c in t.ravel() if c != ignore_index)
    for at in np.ndindex(*t.shape):
        n, *rest = at
        if t[at] == ignore_index:
            continue
        g = grad[at] if reduction == "none" else grad / total if reduction == "mean" else grad
        for c in range(logp.shape[1]):
            result[(n, c, *rest)] = g * own[t[at]] * (np.exp(logp[(n, c, *rest)]) - (c == t[at]))
    return result


def _gather_grad(shape: Array, index: Array, grad: Array, axis: int = 0) -> Array:
    result = np.zeros(shape)
    for at in np.ndindex(*grad.shape):
        k = index[at[axis : axis + index.ndim]]
        result[(*at[:axis], k, *at[axis + index.ndim :])] += grad[at]
    return result


def _gather_elements_grad(grad: Array, shape: Array, index: Array, axis: int = 0) -> Array:
    result = np.zeros(shape)
    for at in np.ndindex(*grad.shape):
        place = list(at)
        place[axis] = index[at]
        result[tuple(place)] += grad[at]
    return result


def _flat(function: Callable[..., Array]) -> Callable[..., Array]:
    """Up to opset 12 a softmax took all dimensions from its axis on for one."""

    def flat(grad: Array, y: Array, axis: int = 1) -> Array:
        rows = int(np.prod(y.shape[:axis]))
        return function(grad.reshape(rows, -1), y.reshape(rows, -1)).reshape(y.shape)

    return flat


def _internal_loss_grad(
    grad: Array,
    logp: Array,
    t: Array,
    w: Array | None = None,
    ignored: Array | None = None,
    more: Any = 0.0,
    **named: Any,
) -> Array:
    index = named.pop("ignore_index", -1 if ignored is None else int(ignored))
    return np.asarray(_loss_grad(grad, logp, t, w, ignore_index=index, **named) + more)


def _log_softmax(z: Array, *_: Array, **__: Any) -> list[Any]:
    return [None, z - np.log(np.sum(np.exp(z), 1, keepdims=True))]


def _gather_nd_grad(shape: Array, index: Array, grad: Array, batch_dims: int = 0) -> Array:
    result = np.zeros(shape)
    for at in np.ndindex(*index.shape[:-1]):
        result[(*at[:batch_dims], *index[at])] += grad[at]
    return result


def _slice_grad(grad: Array, shape: Array, starts: Array, ends: Array, axes: Any = None, steps: Any = None) -> Array:
    result = np.zeros(shape)
    places = [slice(None)] * len(shape)
    for k, axis in enumerate(range(len(starts)) if axes is None else axes):
        places[axis] = slice(int(starts[k]), int(ends[k]), None if steps is None else int(steps[k]))
    result[tuple(places)] = grad
    return result


def _fused_product(a: Array, b: Array, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> Array:
    return np.asarray(alpha * np.matmul(a.swapaxes(-1, -2) if transA else a, b.swapaxes(-1, -2) if transB else b))


_DEFINITIONS: dict[str, Callable[..., Any]] = {
    "FusedMatMul": _fused_product,
    "SoftmaxGrad": _flat(_softmax_grad),
    "LogSoftmaxGrad": _flat(_log_softmax_grad),
    "SoftmaxCrossEntropyLossInternal": _log_softmax,
    "SoftmaxCrossEntropyLossInternalGrad": _internal_loss_grad,
    "GatherNDGrad": _gather_nd_grad,
    "SliceGrad": _slice_grad,
    "Scale": lambda a, k, scale_down=0: a / k if scale_down else a * k,
    "TanhGrad": lambda grad, y: grad - grad * y**2,
    "SigmoidGrad": lambda grad, y: grad * y - grad * y**2,
    "SoftmaxGrad_13": _softmax_grad,
    "LogSoftmaxGrad_13": _log_softmax_grad,
    "SoftmaxCrossEntropyLossGrad": _loss_grad,
    "GatherElementsGrad": _gather_elements_grad,
    "GatherGrad": _gather_grad,
    "ConcatTraining": lambda *parts, axis=0: [np.concatenate(parts, axis), None],
    "SplitTraining": lambda a, sizes, axis=0: np.split(a, np.cumsum(sizes)[:-1], axis),
}


def own(
    op: str,
    *operands: Operand,
    shapes: Sequence[Sequence[Dim]],
    outputs: tuple[bool, ...] = (True,),
    **attributes: Any,
) -> Sample:
    """A node of an operator of com.microsoft."""
    return Sample(op, operands, attributes, outputs, 20, ort_training.DOMAIN, shapes, _DEFINITIONS[op])


def _read() -> Iterator[Sample]:
    yield own("Scale", x("N", 3), scalar(4.0), shapes=[("N", 3)])
    yield own("Scale", x("N", 3), positive(), shapes=[("N", 3)], scale_down=1)
    for op in ("SoftmaxGrad_13", "LogSoftmaxGrad_13"):
        yield own(op, x("N", 3), x("N", 3), shapes=[("N", 3)])
        yield own(op, x("N", 3, 2), x("N", 3, 2), shapes=[("N", 3, 2)], axis=1)
    for reduction, grad in (("mean", x()), ("sum", x()), ("none", x("N"))):
        loss: dict[str, Any] = {"reduction": reduction}
        op = "SoftmaxCrossEntropyLossGrad"
        yield own(op, grad, x("N", 3), below(3, "N"), shapes=[("N", 3)], **loss)
        yield own(op, grad, x("N", 3), below(3, "N", least=-1), shapes=[("N", 3)], ignore_index=-1, **loss)
        yield own(op, grad, x("N", 3), below(3, "N"), positive(3), shapes=[("N", 3)], **loss)
    yield own("SoftmaxCrossEntropyLossGrad", x(), x(2, 3, "N"), below(3, 2, "N"), shapes=[(2, 3, "N")], reduction="sum")
    op = "SoftmaxCrossEntropyLossInternalGrad"
    for reduction, grad in (("mean", x()), ("sum", x()), ("none", x("N"))):
        loss = {"reduction": reduction}
        yield own(op, grad, x("N", 3), below(3, "N"), shapes=[("N", 3)], **loss)
        yield own(op, grad, x("N", 3), below(3, "N", least=-1), None, scalar(-1), shapes=[("N", 3)], **loss)
        yield own(op, grad, x("N", 3), below(3, "N"), positive(3), scalar(7), x("N", 3), shapes=[("N", 3)], **loss)
        yield own(op, grad, x("N", 3), below(3, "N"), None, None, x("N", 3), shapes=[("N", 3)], **loss)
    yield own(op, x(), x("N", 3), below(3, "N"), shapes=[("N", 3)], ignore_index=0)
    op = "SoftmaxCrossEntropyLossInternal"
    yield own(op, x("N", 3), below(3, "N"), shapes=[(), ("N", 3)], outputs=(False, True))
    yield own(op, x(2, 3, "N"), below(3, 2, "N"), shapes=[(), (2, 3, "N")], outputs=(False, True))
    for op in ("SoftmaxGrad", "LogSoftmaxGrad"):
        yield own(op, x("N", 3), x("N", 3), shapes=[("N", 3)])
        yield own(op, x("N", 3, 2), x("N", 3, 2), shapes=[("N", 3, 2)])
        yield own(op, x("N", 3, 2), x("N", 3, 2), shapes=[("N", 3, 2)], axis=2)
    for op in ("TanhGrad", "SigmoidGrad"):
        yield own(op, x("N", 3), x("N", 3), shapes=[("N", 3)])
    yield own("FusedMatMul", x("N", 3), np.ones((3, 1)), shapes=[("N", 1)], alpha=0.5)
    yield own("FusedMatMul", x(3, "N"), np.eye(3), shapes=[("N", 3)], transA=1)
    yield own("FusedMatMul", x(2, "N", 3), np.ones((2, 1, 3)), shapes=[(2, "N", 1)], transB=1, alpha=-2.0)
    yield own("GatherNDGrad", ints(4, 3), below(4, "N", 1), x("N", 3), shapes=[(4, 3)])
    yield own("GatherNDGrad", ints(4, 3, 2), below(3, "N", 2), x("N", 2), shapes=[(4, 3, 2)])
    yield own("GatherNDGrad", ints(2, 4, 3), below(4, 2, 1), x(2, 3), shapes=[(2, 4, 3)], batch_dims=1)
    yield own("SliceGrad", x(2, 4), ints(5, 4), ints(1), ints(3), shapes=[(5, 4)])
    yield own("SliceGrad", x(3, 2), ints(3, 4), ints(-3), ints(-1), ints(1), ints(1), shapes=[(3, 4)])
    yield own("SliceGrad", x(3, 1), ints(3, 4), ints(2), ints(3), ints(-1), shapes=[(3, 4)])
    yield own("GatherElementsGrad", x(3, 2), ints(3, 4), below(4, 3, 2), shapes=[(3, 4)], axis=1)
    yield own("GatherElementsGrad", x(2, 3), ints(4, 3), below(4, 2, 3), shapes=[(4, 3)])
    yield own("GatherGrad", ints(4, 3), below(4, "N"), x("N", 3), shapes=[(4, 3)])
    yield own("GatherGrad", ints(2, 4), below(4, "N"), x(2, "N"), shapes=[(2, 4)], axis=1)
    yield own("GatherGrad", ints(4, 3), below(4, 2, "N"), x(2, "N", 3), shapes=[(4, 3)])
    yield own("GatherElementsGrad", x(3, 2), shape(3, 4), below(4, 3, 2), shapes=[(3, 4)], axis=1)
    yield own("GatherGrad", shape(4, 3), below(4, "N"), x("N", 3), shapes=[(4, 3)])
    yield own("GatherNDGrad", shape(4, 3), below(4, "N", 1), x("N", 3), shapes=[(4, 3)])
    yield own("SliceGrad", x(2, 4), shape(5, 4), ints(1), ints(3), shapes=[(5, 4)])
    yield own("ConcatTraining", x("N", 3), x("N", 2), shapes=[("N", 5), (2,)], outputs=(True, False), axis=1)
    yield own("ConcatTraining", x(2, 3), x(4, 3), shapes=[(6, 3), (2,)], outputs=(True, False))
    yield own("SplitTraining", x(5, 3), ints(2, 3), shapes=[(2, 3), (3, 3)], outputs=(True, True))
    yield own("SplitTraining", x("N", 5), ints(2, 3), shapes=[("N", 2), ("N", 3)], outputs=(True, True), axis=1)


READ = [*_read()]


@pytest.mark.parametrize("sample", READ, ids=str)
def test_form_is_worth_what_the_operation_computes(sample: Sample) -> None:
    compare(sample)
