"""onnx's reference evaluator with what the test by numbers needs: onnxruntime's operators, scatters, windows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx

from gradfuse.passes.reading import ort_training

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

_Array = npt.NDArray[Any]


def evaluator_of(model: onnx.ModelProto) -> ReferenceEvaluator:
    """Return the evaluator of a model."""
    evaluator: ReferenceEvaluator = _evaluator()(model)
    return evaluator


@cache
def _evaluator() -> Any:
    """Return the class of evaluators that compute the bodies of functions by the same operators as the model."""
    from onnx.reference import ReferenceEvaluator

    elements = [_gather_elements(), _scatter_elements()]
    operators = [
        *ort_training.reference_ops(),
        *elements,
        *_convolutions(),
        _max_pool(),
        _average_pool(),
        _cross_entropy(),
    ]

    class Evaluator(ReferenceEvaluator):
        def __init__(self, proto: Any, **options: Any) -> None:
            # The reference makes one for each function, without the operators of the model's.
            super().__init__(proto, **{"new_ops": operators, **options})

    return Evaluator


@cache
def _gather_elements() -> type:
    """Return GatherElements that refuses an index out of range, which the reference counts down for years."""
    from onnx.reference.op_run import OpRun

    class GatherElements(OpRun):
        op_domain = ""

        def _run(self, data: _Array, indices: _Array, axis: int = 0) -> tuple[_Array]:
            return (data[_places(indices, axis)],)

    return GatherElements


@cache
def _scatter_elements() -> type:
    """Return ScatterElements with the reference's results; that takes a step of Python for each element."""
    from onnx.reference.ops import op_scatter_elements

    class ScatterElements(op_scatter_elements.ScatterElements):
        op_domain = ""

        def _run(
            self, data: _Array, indices: _Array, updates: _Array, axis: int = 0, reduction: str | None = None
        ) -> tuple[_Array]:
            if reduction not in (None, "none", "add"):
                return super()._run(data, indices, updates, axis=axis, reduction=reduction)  # type: ignore[no-any-return, no-untyped-call]
            places, scattered = _places(indices, axis), data.copy()
            if reduction == "add":
                np.add.at(scattered, places, updates)
            else:
                scattered[places] = updates
            return (scattered,)

    return ScatterElements


def _places(indices: _Array, axis: int) -> tuple[_Array, ...]:
    """Return the indices of the elements that indices along one axis name."""
    places: list[_Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = indices
    return tuple(places)


@cache
def _cross_entropy() -> type:
    """Return SoftmaxCrossEntropyLoss with the classes along the axis that the labels do not have."""
    from onnx.reference.ops import op_softmax_cross_entropy_loss

    class SoftmaxCrossEntropyLoss(op_softmax_cross_entropy_loss.SoftmaxCrossEntropyLoss):
        op_domain = ""

        def _run(  # type: ignore[override]
            self, scores: _Array, labels: _Array, *more: Any, **options: Any
        ) -> tuple[_Array, ...]:
            along = ort_training.axis_of_classes_at(scores.shape, labels.shape)
            loss, *log_prob = super()._run(np.moveaxis(scores, along, 1), labels, *more, **options)  # type: ignore[no-untyped-call]
            return loss, *(np.moveaxis(one, 1, along) for one in log_prob)

    return SoftmaxCrossEntropyLoss


@cache
def _convolutions() -> tuple[type, type]:
    """Return Conv and ConvTranspose with groups, as products: the reference's are slow, or wrong with groups."""
    from onnx.reference.op_run import OpRun

    class Conv(OpRun):
        op_domain = ""

        def _run(
            self, x: _Array, w: _Array, b: _Array | None = None, group: int | None = None, **options: Any
        ) -> tuple[_Array]:
            strides, dilations, pads = _window(options, w.ndim - 2)
            wide = np.pad(x, [(0, 0), (0, 0), *zip(*pads, strict=True)])
            reach = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
            axes = tuple(range(2, x.ndim))
            windows: Any = np.lib.stride_tricks.sliding_window_view(wide, reach, axes)
            windows = windows[
                (..., *(slice(None, None, s) for s in strides), *(slice(None, None, d) for d in dilations))
            ]
            taps = [1, *range(x.ndim, 2 * x.ndim - 2)]
            parts = [
                np.tensordot(part, kernel, (taps, list(range(1, w.ndim))))
                for part, kernel in zip(np.split(windows, group or 1, 1), np.split(w, group or 1), strict=True)
            ]
            result = np.moveaxis(np.concatenate(parts, -1), -1, 1)
            return (result if b is None else result + b.reshape(-1, *[1] * len(axes)),)

    class ConvTranspose(OpRun):
        op_domain = ""

        def _run(
            self, x: _Array, w: _Array, b: _Array | None = None, group: int | None = None, **options: Any
        ) -> tuple[_Array]:
            spatial = w.ndim - 2
            strides, dilations, (begin, end) = _window(options, spatial)
            more = options.get("output_padding") or [0] * spatial
            sizes = [
                (n - 1) * s + d * (k - 1) + 1 + o
                for n, s, d, k, o in zip(x.shape[2:], strides, dilations, w.shape[2:], more, strict=True)
            ]
            groups = group or 1
            result = np.zeros((x.shape[0], w.shape[1] * groups, *sizes), x.dtype)
            pairs = list(zip(np.split(x, groups, 1), np.split(w, groups), strict=True))
            for tap in itertools.product(*(range(k) for k in w.shape[2:])):
                own: Any = (..., *tap)
                parts = [np.tensordot(kernel[own], part, (0, 1)) for part, kernel in pairs]
                first = [d * k for d, k in zip(dilations, tap, strict=True)]
                ends = [f + (n - 1) * s + 1 for f, n, s in zip(first, x.shape[2:], strides, strict=True)]
                places: Any = (..., *map(slice, first, ends, strides))
                result[places] += np.swapaxes(np.concatenate(parts), 0, 1)
            inner: Any = (..., *(slice(p, n - q) for p, q, n in zip(begin, end, sizes, strict=True)))
            result = result[inner]
            return (result if b is None else result + b.reshape(-1, *[1] * spatial),)

    return Conv, ConvTranspose


@cache
def _max_pool() -> type:
    """Return MaxPool whose indices count from the beginning of the tensor: the reference's do so in some ranks only."""
    from onnx.reference.op_run import OpRun

    class MaxPool(OpRun):
        op_domain = ""

        def _run(self, x: _Array, **options: Any) -> tuple[_Array, ...]:
            kernel = options["kernel_shape"]
            strides, dilations, pads = _window(options, len(kernel))
            if options.get("storage_order"):
                raise NotImplementedError("only indices that count rows first")
            edges = [(0, 0), (0, 0), *zip(*pads, strict=True)]
            reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
            if options.get("ceil_mode"):
                # As many windows as begin within the image.
                for axis, (n, r, s) in enumerate(zip(x.shape[2:], reach, strides, strict=True)):
                    begin, end = edges[axis + 2]
                    more = -(n + begin + end - r) % s
                    last = n + begin + end + more - r
                    edges[axis + 2] = (begin, end + more if last < n + begin else end)
            wide = np.pad(x, edges, constant_values=-np.inf)
            places = np.pad(np.arange(x.size).reshape(x.shape), edges, constant_values=-1)
            axes = tuple(range(2, x.ndim))
            own: Any = (
                ...,
                *(slice(None, None, s) for s in strides),
                *(slice(None, None, d) for d in dilations),
            )
            windows, indices = (np.lib.stride_tricks.sliding_window_view(a, reach, axes)[own] for a in (wide, places))
            shape = windows.shape[: x.ndim]
            windows, indices = (a.reshape(*shape, -1) for a in (windows, indices))
            first = windows.argmax(-1)[..., None]
            taken = (np.take_along_axis(a, first, -1)[..., 0] for a in (windows, indices))
            return tuple(taken)[: len(self.output)]

    return MaxPool


@cache
def _average_pool() -> type:
    """Return AveragePool of windows without padding, whose NaN count: the reference takes them for padding."""
    from onnx.reference.op_run import OpRun

    class AveragePool(OpRun):
        op_domain = ""

        def _run(self, x: _Array, **options: Any) -> tuple[_Array]:
            kernel = options["kernel_shape"]
            strides, dilations, pads = _window(options, len(kernel))
            if any(map(any, pads)) or any(step != 1 for step in dilations) or options.get("ceil_mode"):
                raise NotImplementedError("only windows of neighbours within the image")
            axes = tuple(range(2, x.ndim))
            own: Any = (..., *(slice(None, None, s) for s in strides), *(slice(None) for _ in kernel))
            windows = np.lib.stride_tricks.sliding_window_view(x, kernel, axes)[own]
            return (windows.mean(tuple(range(x.ndim, windows.ndim))),)

    return AveragePool


def _window(options: dict[str, Any], spatial: int) -> tuple[Sequence[int], Sequence[int], tuple[list[int], list[int]]]:
    """Return strides, dilations, and the paddings at beginnings and at ends."""
    if options.get("auto_pad") not in (None, "NOTSET", "VALID") or options.get("output_shape"):
        raise NotImplementedError("only paddings that are given")
    pads = list(options.get("pads") or [0] * 2 * spatial)
    ones = [1] * spatial
    return options.get("strides") or ones, options.get("dilations") or ones, (pads[:spatial], pads[spatial:])
