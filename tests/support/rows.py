"""A model with a free batch against the one with a fixed batch that it was made of, row by row, in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

Array = npt.NDArray[Any]
SIZES = (2, 3, 5)
_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    """A session that runs the nodes as they are: fusions depend on which sizes are known."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def assert_rows_agree(
    fixed: onnx.ModelProto,
    free: onnx.ModelProto,
    axes: Mapping[str, int | None] | None = None,
    *,
    merged: Mapping[str, tuple[int, int]] | None = None,
    roundings: float = 64,
    seed: int = 0,
) -> set[str]:
    """Compare each row of what `free` gives with what `fixed` gives of that row alone; at its batch, the bits.

    Args:
        fixed: the model as it was.
        free: the model with a free batch.
        axes: input -> the axis of the batch, 0 where it is not there, or None.
        merged: output -> the axis that the batch is merged into, and how many numbers of it are outside of the batch.
        roundings: how many of the largest number of an output they may be apart: sums are in another order.
        seed: of the inputs.

    Returns:
        The outputs that have rows.
    """
    one, other = session(fixed), session(free)
    inputs = {value.name: value for value in one.get_inputs()}
    axis_of = {name: (axes or {}).get(name, 0 if value.shape else None) for name, value in inputs.items()}
    sizes = [inputs[name].shape[axis] for name, axis in axis_of.items() if axis is not None]
    batch = next((size for size in sizes if isinstance(size, int)), 1)
    rng = np.random.default_rng(seed)

    def drawn(count: int) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, value in inputs.items():
            shape = [size if isinstance(size, int) else 4 for size in value.shape]
            if (axis := axis_of[name]) is not None:
                shape[axis] = count
            dtype = _DTYPES[value.type]
            numbers = rng.standard_normal(shape) if dtype is np.float32 else rng.integers(0, 2, shape)
            found[name] = np.asarray(numbers, dtype)
        return found

    feed = drawn(batch)
    for before, after in zip(one.run(None, feed), other.run(None, feed), strict=True):
        assert before.dtype == after.dtype and before.size == after.size and before.tobytes() == after.tobytes()
    compared = set()
    for count in SIZES:
        feed = drawn(count)
        results = other.run(None, feed)
        for row in range(count):
            alone = {
                name: array if (axis := axis_of[name]) is None else np.repeat(array.take([row], axis), batch, axis)
                for name, array in feed.items()
            }
            for value, result, wanted in zip(other.get_outputs(), results, one.run(None, alone), strict=True):
                places = [axis for axis, size in enumerate(value.shape) if size in ("batch", "N")]
                if value.name in (merged or {}):
                    axis, before = (merged or {})[value.name]
                    result, wanted = (_apart(a, axis, before, n) for a, n in ((result, count), (wanted, batch)))
                    axis += 1
                elif places:
                    (axis,) = places
                else:
                    continue
                assert result.shape[axis] == count
                # A batch of one row may have been squeezed away.
                expected = wanted if wanted.ndim < result.ndim else wanted.take(0, axis)
                got = result.take(row, axis)
                assert got.shape == expected.shape
                scale = np.abs(expected).max(initial=0) if expected.dtype.kind == "f" else 0
                bound = float(roundings * np.finfo(np.float32).eps * scale)
                np.testing.assert_allclose(got, expected, rtol=0, atol=bound)
                compared.add(value.name)
    return compared


def _apart(array: Array, axis: int, before: int, batch: int) -> Array:
    """The array with the batch at an axis of its own, behind `axis`."""
    shape = array.shape
    return array.reshape(*shape[:axis], before, batch, shape[axis] // before // batch, *shape[axis + 1 :])
