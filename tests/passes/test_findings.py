"""Graphs of tests/findings that are almost backward passes: fused or not, they compute what they did.

The files were found by an attack from outside. Each is fused with both policies and run with the library and by
function bodies, for sizes that are 1 beside others and for numbers near the constants of the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradfuse

FINDINGS = Path(__file__).parent.parent / "findings"
Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]

SLICES = ["slice_last_default_policy", "slice_first", "split_first", "first_probabilities", "tile_run_time_1"]
WRONG = {
    **dict.fromkeys(SLICES, (0.0, 1.0)),
    "two_dims_one_is_1": (0.0, 1.0),
    "softmax_last_query": (0.0, 1.0),
    "softmax_mask_first_row": (0.0, 1.0),
    "cross_entropy_first_target": (0.0, 1.0),
    "gather_elements_one_index": (0.0, 1.0),
    "exp_underflow": (1000.0, 1.0),
    "exp_clamp": (-1000.0, 1.0),
    "pow_underflow": (0.0, 1e38),
    "mul_underflow": (0.0, 1e38),
    "exp_product_underflow": (500.0, 1.0),
}
"""Files, and the mean and spread of x at which they went wrong."""
READ_WRONG = ["pad_axes", "cast_rounds", "seven_digits"]
NATIVE_DOUBLE = 4 * float(np.finfo(np.float32).eps)


def _feeds(model: onnx.ModelProto, sizes: dict[str, int], mean: float, spread: float) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for value in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        match value.type.tensor_type.elem_type:
            case onnx.TensorProto.FLOAT:
                x = rng.standard_normal(shape)
                feeds[value.name] = (x * spread + mean if value.name == "x" else x).astype(np.float32)
            case onnx.TensorProto.BOOL:
                feeds[value.name] = rng.random(shape) < 0.4
            case _:
                ends = np.array([2, 5, 8])
                feeds[value.name] = ends if value.name == "ends" else rng.integers(0, 3, shape)
    return feeds


def _sizes(model: onnx.ModelProto) -> Iterator[dict[str, int]]:
    dims = dict.fromkeys(d.dim_param for v in model.graph.input for d in v.type.tensor_type.shape.dim if d.dim_param)
    for sizes in itertools.product((1, 2, 4), repeat=len(dims)):
        yield dict(zip(dims, sizes, strict=True))


def _session(model: onnx.ModelProto, *, registered: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if registered:
        gradfuse.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("policy", ("profitable", "all"))
@pytest.mark.parametrize("name", [*WRONG, *READ_WRONG])
def test_fused_or_not_it_computes_what_it_did(name: str, policy: str) -> None:
    model = onnx.load(FINDINGS / f"{name}.onnx")
    result = gradfuse.fuse(model, policy=policy)
    assert not [m for m in result.report.near_misses if m.bug]
    original = _session(model, registered=False)
    fused = [_session(result.model, registered=registered) for registered in (True, False)]
    mean, spread = WRONG.get(name, (0.0, 1.0))
    taken = 0
    for sizes in _sizes(model):
        feeds = _feeds(model, sizes, mean, spread)
        try:
            expected = original.run(None, feeds)
        except Exception:  # Sizes that the graph does not take.
            continue
        taken += 1
        for session in fused:
            for wanted, got in zip(expected, session.run(None, feeds), strict=True):
                assert got.shape == wanted.shape
                np.testing.assert_allclose(got, wanted, rtol=0, atol=NATIVE_DOUBLE * np.abs(wanted).max(initial=0))
    assert taken


def test_cross_entropy_with_fewer_targets_than_rows_is_fused_and_pads_them() -> None:
    """torch.gather takes an index that ends early; so does its gradient, whose other rows are zero."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
    m (float[N,5] z, int64[M] t) => (float[N,5] r) {
      l = LogSoftmax<axis=1>(z)  axis = Constant<value_ints=[1]>()  u = Unsqueeze(t, axis)
      count = Shape(t)  size = Cast<to=1>(count)  minus = Constant<value_float=-1.0>()
      share = Div(minus, size)  shape = Shape(u)  shares = Expand(share, shape)
      all = Shape(z)  blank = ConstantOfShape<value = float[1] {0.0}>(all)
      m = ScatterElements<axis=1, reduction="add">(blank, u, shares)
      s = ReduceSum(m, axis)  e = Exp(l)  es = Mul(e, s)  r = Sub(m, es)
    }""")
    result = gradfuse.fuse(model, policy="all")
    assert [f.op for f in result.report.fusions] == ["CrossEntropyLossGrad"]
    sessions = [_session(m, registered=r) for m, r in ((model, False), (result.model, True), (result.model, False))]
    rng = np.random.default_rng(0)
    for rows, targets in ((4, 4), (4, 2), (5, 1), (1, 1)):
        feeds = {"z": rng.standard_normal((rows, 5)).astype(np.float32), "t": rng.integers(0, 5, targets)}
        wanted, *got = (session.run(None, feeds)[0] for session in sessions)
        assert not wanted[targets:].any()
        for actual in got:
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=NATIVE_DOUBLE)
