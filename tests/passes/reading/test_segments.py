"""Sums over segments by a table of the numbers of rows, which tf2onnx writes for the gradient of a gather."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from evaluation import Array, Evaluation
from graphs import GraphBuilder
from onnx import TensorProto
from onnx_ir.passes.common import ShapeInferencePass
from producers import run
from variants import C, N, after_the_first, arange, blank, of_all_places, sorted_ids, summed_by_table

from gradfuse.passes.reading import Forms

IDS = np.asarray([7, 2, 7, 0, 2, 7])
ROWS = np.random.default_rng(0).standard_normal((N, 1)).astype(np.float32)
READ: dict[str, dict[str, Any]] = {
    "as tf2onnx does": {},
    "the largest first": {"order": lambda g, ids: sorted_ids(g, ids, largest=1)},
    "after the first of its kind, in any order": {
        "place": after_the_first,
        "order": lambda g, ids: (ids, arange(g, N)),
        "blank": of_all_places,
    },
    "a column for each row": {"place": lambda g, key: arange(g, N), "blank": of_all_places},
    "filled with the row of zeros": {"blank": lambda g, key: blank(g, key, N)},
    "a dimension is kept": {"keepdims": 1},
}
UNREAD: dict[str, dict[str, Any]] = {
    "rows of a segment on one place": {"order": lambda g, ids: (ids, arange(g, N))},
    "filled with the first row": {"blank": lambda g, key: blank(g, key, 0)},
    "a row of ones": {"below": 1.0},
    "every row on the first place": {"place": lambda g, key: g.ints(*[0] * N), "blank": of_all_places},
    "numbers of rows sorted otherwise": {
        "order": lambda g, ids: (sorted_ids(g, ids, largest=0)[0], sorted_ids(g, ids, largest=1)[1])
    },
    "columns from the end": {
        "place": lambda g, key: g.op("Sub", arange(g, N), g.constant(N, np.int64)),
        "blank": of_all_places,
    },
    "of the sorted ids, one after the other": {
        "order": lambda g, ids: (sorted_ids(g, ids, largest=0)[0], arange(g, N))
    },
}


def _read(how: dict[str, Any]) -> tuple[Any, Any]:
    """The sums by onnxruntime and what their form is worth, None where a table is not read."""
    g = GraphBuilder()
    ids, rows = g.input("ids", TensorProto.INT64, [N]), g.input("rows", TensorProto.FLOAT, [N, 1])
    g.output(summed_by_table(g, ids, rows, **how))
    proto = g.model()
    model = ShapeInferencePass(strict_mode=False)(ir.from_proto(proto)).model
    forms = Forms(model.graph)
    form = forms.get(model.graph.outputs[0])
    assert form is not None
    (wanted,) = run(proto, {"ids": IDS, "rows": ROWS}).values()
    if not forms.algebra.tensors(form.poly) <= {"ids", "rows"}:
        return wanted, None
    tensors: dict[object, Array] = {"ids": IDS, "rows": ROWS[:, 0].astype(np.float64)}
    return wanted, Evaluation(forms.algebra, tensors, {}).form(form)


@pytest.mark.parametrize("name", READ)
def test_sums_over_segments_are_read(name: str) -> None:
    wanted, worth = _read(READ[name])
    expected = np.zeros(N * C)
    np.add.at(expected, IDS, ROWS[:, 0])
    np.testing.assert_allclose(wanted.ravel(), expected, rtol=1e-6)
    assert worth is not None
    assert worth.shape == wanted.shape
    np.testing.assert_allclose(worth, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", UNREAD)
def test_other_tables_are_not_read_as_sums_over_segments(name: str) -> None:
    wanted, worth = _read(UNREAD[name])
    if worth is not None:
        np.testing.assert_allclose(worth, wanted, rtol=1e-6)
