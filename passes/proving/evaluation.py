"""onnx's reference evaluator with what the proofs need: onnxruntime's own operators, and scatters by numpy."""

from __future__ import annotations

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
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(model, new_ops=[*ort_training.reference_ops(), _scatter_elements()])


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
            places: list[_Array] = list(np.indices(indices.shape, sparse=True))
            places[axis] = indices
            scattered = data.copy()
            if reduction == "add":
                np.add.at(scattered, tuple(places), updates)
            else:
                scattered[tuple(places)] = updates
            return (scattered,)

    return ScatterElements
