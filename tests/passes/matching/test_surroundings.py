"""Gradients inside functions, branches and loops, in older default opsets, and beside operators that nothing reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from producers import run

from gradfuse import fuse
from gradfuse.testing import assert_gradients_close

Feeds = dict[str, np.ndarray[Any, Any]]
RNG = np.random.default_rng(0)
FEEDS: Feeds = {
    "z": RNG.normal(size=(6, 5)).astype(np.float32),
    "t": np.asarray([0, 4, 2, 1, 3, 3]),
    "t8": np.asarray([0, 8, 4, 2, 6, 6], np.uint8),
    "s": RNG.normal(size=(2, 4, 4)).astype(np.float32),
    "u": RNG.normal(size=(2, 4, 4)).astype(np.float32),
    "a": RNG.normal(size=(4, 3)).astype(np.float32),
    "goal": RNG.normal(size=(4, 3)).astype(np.float32),
    "as": RNG.normal(size=(2, 4, 3)).astype(np.float32),
    "bs": RNG.normal(size=(2, 4, 3)).astype(np.float32),
    "yes": np.asarray(True),
    "times": np.asarray(3),
}
_HEAD = '<ir_version: {ir}, opset_import: ["": {opset}, "local": 1]>'
_LOCAL = '<domain: "local", opset_import: ["": 18]>'
_SOFTMAX = "(float[B, 4, 4] s, float[B, 4, 4] u) => (float[B, 4, 4] y)"
_LOSS = "(float[N, 5] z, int64[N] t) => (float[N, 5] y)"
_HOT = """
    depth = Constant<value_int=5>()
    pair = Constant<value_floats=[0.0, 1.0]>()
    hot = OneHot(t, depth, pair)
"""
_P_LESS_HOT = """
    p = Softmax(z)
    less = Sub(p, hot)
    k = Constant<value_float=0.25>()
    scaled = Mul(less, k)
"""
_CORE = """
    weighted = Mul(u, p)
    axis = Constant<value_ints=[-1]>()
    total = ReduceSum(weighted, axis)
    less = Sub(u, total)
    d = Mul(p, less)
"""
_CORE_11 = """
    weighted = Mul(u, p)
    total = ReduceSum<axes=[2]>(weighted)
    less = Sub(u, total)
    d = Mul(p, less)
"""
_STEP = """
    d = Sub(x, goal)
    k = Constant<value_float=0.16666667>()
    scaled = Mul(d, k)
"""

MODELS = {
    "a function": (
        "ScaledMaskedSoftmaxBackward",
        18,
        f"g {_SOFTMAX} {{ y = local.Backward(s, u) }} {_LOCAL} Backward (s, u) => (d) {{ p = Softmax(s) {_CORE} }}",
    ),
    "two functions": (
        "ScaledMaskedSoftmaxBackward",
        18,
        f"g {_SOFTMAX} {{ p = local.Forward(s) d = local.Backward(p, u) y = Neg(d) }}"
        f"{_LOCAL} Forward (s) => (p) {{ p = Softmax(s) }} {_LOCAL} Backward (p, u) => (d) {{ {_CORE} }}",
    ),
    "a part in a function": (
        "CrossEntropyLossGrad",
        18,
        f"g {_LOSS} {{ hot = local.Hot(t) {_P_LESS_HOT} y = Neg(scaled) }} {_LOCAL} Hot (t) => (hot) {{ {_HOT} }}",
    ),
    "a branch": (
        "CrossEntropyLossGrad",
        18,
        f"""g (float[N, 5] z, int64[N] t, bool yes) => (float[N, 5] y) {{
            y = If(yes) <
                then_branch = one () => (float[N, 5] d) {{ {_HOT} {_P_LESS_HOT} d = Neg(scaled) }},
                else_branch = other () => (float[N, 5] e) {{ e = Identity(z) }}
            >
        }}""",
    ),
    "a scan": (
        "MseLossBackward",
        18,
        f"""g (float[4, 3] a, float[T, 4, 3] as, float[T, 4, 3] bs) => (float[4, 3] z, float[T, 4, 3] y) {{
            z, y = Scan<num_scan_inputs = 2,
                body = step (float[4, 3] sum, float[4, 3] x, float[4, 3] goal) => (float[4, 3] next, float[4, 3] row) {{
                    {_STEP} row = Neg(scaled) next = Add(sum, scaled)
                }}>(a, as, bs)
        }}""",
    ),
    "a loop": (
        "MseLossBackward",
        18,
        f"""g (int64 times, bool yes, float[4, 3] a, float[4, 3] goal) => (float[4, 3] y) {{
            y = Loop<body = step (int64 i, bool on, float[4, 3] x) => (bool still, float[4, 3] next) {{
                {_STEP} next = Sub(x, scaled) still = Identity(on)
            }}>(times, yes, a)
        }}""",
    ),
    "an unknown operator": (
        "CrossEntropyLossGrad",
        18,
        f"""g (float[N, 5] z, uint8[N] t8) => (float[N, 5] y) {{
            half = Constant<value_float=0.5>()
            real = DequantizeLinear(t8, half)
            t = Cast<to=7>(real) {_HOT} {_P_LESS_HOT} y = Neg(scaled)
        }}""",
    ),
    "opset 15": ("CrossEntropyLossGrad", 15, f"g {_LOSS} {{ {_HOT} {_P_LESS_HOT} y = Neg(scaled) }}"),
    "opset 13": ("ScaledMaskedSoftmaxBackward", 13, f"g {_SOFTMAX} {{ p = Softmax(s) {_CORE} y = Neg(d) }}"),
    "opset 11": (
        "ScaledMaskedSoftmaxBackward",
        11,
        f"g {_SOFTMAX} {{ p = Softmax<axis=2>(s) {_CORE_11} y = Neg(d) }}",
    ),
}


def _parsed(text: str, opset: int) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_HEAD.format(ir=8 if opset >= 15 else 7, opset=opset) + text)
    onnx.checker.check_model(model, full_check=True)
    return model


def _check_same(model: onnx.ModelProto, fused: onnx.ModelProto) -> None:
    onnx.checker.check_model(fused, full_check=True)
    wanted, got = run(model, FEEDS), run(fused, FEEDS)
    for name, value in wanted.items():
        assert_gradients_close(got[name], value, value.astype(np.float64), np.float32, terms=8)


@pytest.mark.parametrize("name", MODELS)
def test_is_recognised(name: str) -> None:
    operator, opset, text = MODELS[name]
    model = _parsed(text, opset)
    before = model.SerializeToString()
    result = fuse(model, policy="all")
    assert operator in {f.op for f in result.report.fusions}, result.report
    assert model.SerializeToString() == before
    _check_same(model, result.model)


def test_softmax_of_an_older_opset_runs_over_all_later_dimensions() -> None:
    model = _parsed(f"g {_SOFTMAX} {{ p = Softmax<axis=1>(s) {_CORE_11} y = Neg(d) }}", 11)
    result = fuse(model, policy="all")
    assert not result.report.fusions
    assert result.model == ir.to_proto(ir.from_proto(model))


def test_functions_of_an_older_opset_stay_where_nothing_is_fused() -> None:
    text = f"g {_SOFTMAX} {{ y = local.Backward(s, u) }} {_LOCAL} Backward (s, u) => (d) {{ d = Add(s, u) }}"
    model = _parsed(text.replace('"": 18', '"": 14'), 14)
    assert fuse(model).model == ir.to_proto(ir.from_proto(model))


def test_functions_stay_where_nothing_is_fused_in_them() -> None:
    text = f"g {_SOFTMAX} {{ y = local.Plus(s, u) }} {_LOCAL} Plus (s, u) => (d) {{ d = Add(s, u) }}"
    model = _parsed(text, 18)
    assert fuse(model, policy="all").model == ir.to_proto(ir.from_proto(model))
