"""Conditions on sizes fail within a model where they do not hold in Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import sympy  # type: ignore[import-untyped]
from torch.utils._sympy import functions as symbolic

from gradfuse.export.size_terms import term_of
from gradfuse.training import batch_checks
from gradfuse.training.batch_checks import SizeCheck, SizeOf

N, M = sympy.symbols("n m", integer=True, nonnegative=True)
REAL = symbolic.ToFloat(N)

LARGER, SMALLER = symbolic.Max(N, M, 3), symbolic.Min(N + 2, 9)  # type: ignore[no-untyped-call]

CASES: dict[str, tuple[Any, Callable[[int, int], bool]]] = {
    "sums and products": (sympy.Le(3 * N + N * M - 7, M**2), lambda n, m: 3 * n + n * m - 7 <= m**2),
    "remainders": (sympy.Eq(symbolic.PythonMod(5 - N, 3), 2), lambda n, m: (5 - n) % 3 == 2),
    "by a size": (sympy.Ne(symbolic.PythonMod(N, M), 1), lambda n, m: n % m != 1),
    "quotients": (sympy.Eq(symbolic.FloorDiv(3 - N, 2), -2), lambda n, m: (3 - n) // 2 == -2),
    "a quotient by a size": (sympy.Gt(symbolic.FloorDiv(N, M), 1), lambda n, m: n // m > 1),
    "ratios": (sympy.Lt(symbolic.IntTrueDiv(N, M), 0.7), lambda n, m: n / m < 0.7),
    "extremes": (sympy.Eq(LARGER, SMALLER), lambda n, m: max(n, m, 3) == min(n + 2, 9)),
    "a fraction": (sympy.Ge(symbolic.PythonMod(0.5 * REAL, 2.0), 1.0), lambda n, m: 0.5 * n % 2.0 >= 1.0),
    "below 0": (sympy.Gt(symbolic.PythonMod(0.5 - REAL, 3.0), 1.0), lambda n, m: (0.5 - n) % 3.0 > 1.0),
    "floor": (sympy.Eq(symbolic.FloorToInt(1.5 - 0.3 * REAL), -1), lambda n, m: (1.5 - 0.3 * n) // 1 == -1),
    "ceiling": (sympy.Eq(symbolic.CeilToInt(0.3 * REAL), 2), lambda n, m: -(-0.3 * n // 1) == 2),
    "toward 0": (sympy.Eq(symbolic.TruncToInt(1.5 - 0.3 * REAL), 0), lambda n, m: int(1.5 - 0.3 * n) == 0),
    "to even": (sympy.Eq(symbolic.RoundToInt(0.5 * REAL), 2), lambda n, m: round(0.5 * n) == 2),
    "a root": (sympy.Eq(symbolic.OpaqueUnaryFn_sqrt(REAL), 3.0), lambda n, m: n**0.5 == 3.0),
    "a power": (sympy.Lt(symbolic.FloatPow(REAL, 1.5), 20.0), lambda n, m: n**1.5 < 20.0),
    "bits": (
        sympy.Eq(symbolic.BitwiseFn_bitwise_and(N, symbolic.BitwiseFn_bitwise_or(M, 5)), 4),
        lambda n, m: n & (m | 5) == 4,
    ),
    "other bits": (sympy.Gt(symbolic.BitwiseFn_bitwise_xor(N, M), N), lambda n, m: n ^ m > n),
    "all": (sympy.And(N > 2, M >= 3), lambda n, m: n > 2 and m >= 3),
    "any": (sympy.Or(N > 8, sympy.Eq(M, 3)), lambda n, m: n > 8 or m == 3),
}


def _model(condition: Any) -> ort.InferenceSession:
    term = term_of(condition, {"n": SizeOf("x", 0), "m": SizeOf("x", 1)})
    assert term is not None
    model = ir.from_proto(
        onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 20]> g (float[n, m] x) => (float[n, m] y) { y = Neg(x) }"""
        )
    )
    batch_checks.append_to_evaluation(model, [SizeCheck(term, "out of range")], "checks")
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("case", CASES)
def test_a_model_fails_where_a_condition_does_not_hold_in_python(case: str) -> None:
    condition, wanted = CASES[case]
    session, seen = _model(condition), set()
    for n, m in itertools.product(range(12), range(5)):
        try:
            holds = wanted(n, m)
        except ZeroDivisionError:
            holds = False
        seen.add(holds)
        x = np.ones((n, m), np.float32)
        if holds:
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], -x)
        else:
            with pytest.raises(Exception, match="Name:'out of range'"):
                session.run(None, {"x": x})
    assert seen == {True, False}


def test_what_is_more_than_arithmetic_is_no_term() -> None:
    sizes = {"n": SizeOf("x", 0)}
    assert term_of(sympy.Gt(symbolic.OpaqueUnaryFn_log(REAL), 2.0), sizes) is None
    assert term_of(sympy.Gt(N, 1 << 40), sizes) is None
