"""Central differences of ONNX models in float64, by onnx's own evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from fuzzing import in_float64
from onnx.reference import ReferenceEvaluator

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]


class Differences:
    """The derivative of the sum of a model's float outputs, each multiplied by a seed.

    Args:
        model: the model, in float32 or float64.
        seeds: output -> what it is multiplied by.
        wide: whether it is computed in float64.
    """

    def __init__(self, model: onnx.ModelProto, seeds: Feeds, *, wide: bool = True) -> None:
        computed, noise = in_float64(model) if wide else (model, [])
        self._noise = {name: np.ones(()) for name in noise}
        self._session = ReferenceEvaluator(computed)
        self._names = [output.name for output in model.graph.output]
        self._seeds = seeds
        self._dtype = np.float64 if wide else np.float32
        # The evaluator computes some operators in float32 anyway, which a smaller step would not see past.
        self._step = 2e-3 if wide else 2e-2

    def value(self, feeds: Feeds) -> float:
        typed = {n: a.astype(self._dtype) if a.dtype.kind == "f" else a for n, a in feeds.items()}
        outputs = dict(zip(self._names, self._session.run(None, typed | self._noise), strict=True))
        return float(sum((outputs[name] * seed).sum() for name, seed in self._seeds.items()))

    def along(self, feeds: Feeds, name: str, direction: Array) -> float:
        """Return the derivative of an input along a direction, by five points."""
        x, step = feeds[name].astype(np.float64), self._step
        at = {k: self.value({**feeds, name: x + k * step * direction}) for k in (-2, -1, 1, 2)}
        return (at[-2] - 8 * at[-1] + 8 * at[1] - at[2]) / (12 * step)


def directions(shape: Sequence[int], count: int, rng: np.random.Generator) -> list[Array]:
    """Return random directions of length 1: each sees an error in any element."""
    found = [rng.standard_normal(shape) for _ in range(count)]
    return [np.asarray(d / max(float(np.sqrt((d * d).sum())), 1e-30)) for d in found]
