"""Models run in float64, whatever kernels onnxruntime has: the numbers are PyTorch's in float64."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from backends import ONNX_TYPES, one_node, with_bodies
from operators import SAMPLES
from torch import Tensor

import gradfuse
from gradfuse.checking import reference
from gradfuse.checking.execution import Session
from gradfuse.checking.reference import ReferenceSession, moved
from gradfuse.custom_ops import OPS
from gradfuse.models import memory


def in_float64(text: str, **feeds: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    model = ir.from_proto(onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]> ' + text))
    return list(ReferenceSession(model, "model").run(feeds).values())


def assert_same(result: np.ndarray[Any, Any], expected: Tensor) -> None:
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-12, atol=1e-12)


@pytest.fixture(params=["torch", "numpy"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch is loaded it computes what onnxruntime does not; else numpy does."""
    if request.param == "numpy":
        monkeypatch.setattr(reference, "_of_torch", lambda name: None)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(
    "channels, maps, groups, size, kernel, stride, padding, dilation",
    [
        (4, 6, 2, (7, 8), (3, 2), (2, 1), (1, 0), (1, 2)),
        (3, 5, 1, (9,), (4,), (2,), (1,), (2,)),
        (4, 4, 4, (5, 5, 6), (3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1)),
        (4, 6, 2, (8, 8), (8, 7), (1, 1), (1, 0), (1, 1)),
    ],
)
def test_convolutions(
    channels: int, maps: int, groups: int, size: Any, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(2, channels, *size), torch.randn(maps)
    options = f"strides = {[*stride]}, pads = {[*padding] * 2}, dilations = {[*dilation]}, group = {groups}"
    text = "g (float[N] x, float[M] w, float[O] b) => (float[Y] y) { y = OP (x, w, b) }"
    shape = ",".join(map(str, x.shape))
    more = [one - 1 for one in stride]
    weights = torch.randn(maps, channels // groups, *kernel), torch.randn(channels, maps // groups, *kernel)
    forward = [F.conv1d, F.conv2d, F.conv3d][len(size) - 1]
    transposed: Any = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d][len(size) - 1]
    for weight, op in zip(
        weights, (f"Conv <{options}>", f"ConvTranspose <{options}, output_padding = {more}>"), strict=True
    ):
        filled = text.replace("OP", op).replace("[N]", f"[{shape}]").replace("[O]", f"[{maps}]")
        filled = filled.replace("[M]", "[" + ",".join(map(str, weight.shape)) + "]")
        filled = filled.replace("[Y]", "[" + ",".join(f"y{k}" for k in range(x.dim())) + "]")
        (result,) = in_float64(filled, x=x.numpy(), w=weight.numpy(), b=bias.numpy())
        one, other, third = x.double(), weight.double(), bias.double()
        if op.startswith("ConvTranspose"):
            assert_same(result, transposed(one, other, third, stride, padding, more, groups, dilation))
        else:
            assert_same(result, forward(one, other, third, stride, padding, dilation, groups))


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Erf": torch.erf,
    "Gelu": F.gelu,
    'Gelu <approximate = "tanh">': lambda x: F.gelu(x, approximate="tanh"),
    "Elu <alpha = 0.5>": lambda x: F.elu(x, 0.5),
    "Celu <alpha = 0.5>": lambda x: F.celu(x, 0.5),
    "LeakyRelu <alpha = 0.25>": lambda x: F.leaky_relu(x, 0.25),
    "Shrink <lambd = 0.25, bias = 0.25>": lambda x: F.softshrink(x, 0.25),
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Mish": F.mish,
    "HardSwish": F.hardswish,
    "HardSigmoid <alpha = 0.25, beta = 0.5>": lambda x: (0.25 * x + 0.5).clamp(0, 1),
    "ThresholdedRelu <alpha = 0.5>": lambda x: F.threshold(x, 0.5, 0.0),
    "Atan": torch.atan,
    "Sinh": torch.sinh,
    "GlobalAveragePool": lambda x: x.mean((2, 3), keepdim=True),
    "GlobalMaxPool": lambda x: x.amax((2, 3), keepdim=True),
    "AveragePool <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 0]>": lambda x: F.avg_pool2d(
        x, (3, 2), (2, 1), (1, 0), count_include_pad=False
    ),
    "AveragePool <kernel_shape = [3, 3], strides = [2, 3], ceil_mode = 1, count_include_pad = 1>": lambda x: (
        F.avg_pool2d(x, 3, (2, 3), ceil_mode=True)
    ),
}


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("op", UNARY)
def test_functions_that_onnxruntime_computes_in_float32_only(op: str) -> None:
    torch.manual_seed(0)
    x = 2 * torch.randn(2, 3, 8, 9)
    # Between two nodes of onnxruntime's.
    text = f"g (float[2,3,8,9] x) => (float[a,b,c,d] y) {{ m = Neg (x) n = Neg (m) f = {op} (n) y = Neg (f) }}"
    (result,) = in_float64(text, x=x.numpy())
    assert_same(result, -UNARY[op](x.double()))


def test_the_statistics_of_layer_normalization() -> None:
    x, scale = torch.randn(4, 6), torch.rand(6) + 0.5
    text = """g (float[4,6] x, float[6] s) => (float[4,6] y, float[4,1] m, float[4,1] r)
    { y, m, r = LayerNormalization <epsilon = 0.5> (x, s) }"""
    results = in_float64(text, x=x.numpy(), s=scale.numpy())
    for result, expected in zip(
        results, torch.native_layer_norm(x.double(), [6], scale.double(), torch.zeros(6).double(), 0.5), strict=True
    ):
        assert_same(result, expected)


@pytest.mark.parametrize("number", range(len(SAMPLES["LinearCrossEntropy"].all_typical(torch.float32))))
def test_heads_are_computed_by_their_kernel(number: int) -> None:
    """Also where another function of the model is inlined, as it has nodes for numpy."""
    samples = SAMPLES["LinearCrossEntropy"]
    sample = samples.all_typical(torch.float32)[number]
    expected = samples.expected(sample, torch.float64)
    types = [None if one is None else (ONNX_TYPES[one.dtype], list(one.shape)) for one in sample.inputs]
    model = one_node("LinearCrossEntropy", types, sample.attributes, ranks=[one.dim() for one in expected])
    names = [value.name for value in OPS["LinearCrossEntropy"].inputs]
    feeds = {name: one.numpy() for name, one in zip(names, sample.inputs, strict=True) if one is not None}
    with_erf = onnx.parser.parse_function('<domain: "own", opset_import: ["": 17]> erf (x) => (y) { y = Erf(x) }')
    for inlines in (False, True):
        if inlines:
            model.functions.append(with_erf)
            model.opset_import.append(onnx.helper.make_opsetid("own", 1))
            model.graph.node.append(onnx.helper.make_node("erf", ["input"], ["y"], domain="own"))
            model.graph.output.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None))
        found = ReferenceSession(ir.from_proto(with_bodies(model)), "model").run(feeds)
        for result, exact in zip(found.values(), expected, strict=False):
            assert_same(result, exact)


def test_functions_with_float_attributes_and_subgraphs_are_widened() -> None:
    """The body of a fused operator, with a scale that is its attribute."""
    text = """<ir_version: 10, opset_import: ["" : 20, "local" : 1]> g (float[3,4] x) => (float[3,4] y)
    { y = local.Scaled <scale = 0.75> (x) }
    <domain: "local", opset_import: ["" : 20]> Scaled <scale> (a) => (b)
    { s = Constant <value_float: float = @scale> () e = Erf (a) b = Mul (e, s) }"""
    x = torch.randn(3, 4)
    session = ReferenceSession(ir.from_proto(onnx.parser.parse_model(text)), "model")
    assert_same(session.run({"x": x.numpy()})["y"], torch.erf(x.double()) * 0.75)


def test_sizes_may_change_between_runs() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[n, 4] x) => (float[n, 4] y) { y = Exp (x) }"""
    session = ReferenceSession(ir.from_proto(onnx.parser.parse_model(text)), "model")
    for count in (2, 5, 2):
        x = torch.randn(count, 4)
        assert_same(session.run({"x": x.numpy()})["y"], x.double().exp())


def test_moving_changes_what_rounds_and_nothing_else() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[99] x) => (float[99] y, float[99] r, float[99] w)
    { y = Exp (x) r = Relu (y) z = Sub (x, x) w = Exp (z) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    x = np.linspace(0.1, 2.1, 99)
    session = ReferenceSession(moved(model, 1e-3), "model")
    first, second = session.run({"x": x}), session.run({"x": x})
    off = np.abs(first["y"] / np.exp(x) - 1)
    # Of the argument, and of the result.
    assert 1e-4 < off.max() < 4e-3 and not np.array_equal(first["y"], second["y"])
    np.testing.assert_array_equal(first["r"], first["y"])
    np.testing.assert_array_equal(first["w"], np.ones(99))


def test_a_model_that_cannot_be_run_in_float64_is_refused_in_one_line() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20, "nobody" : 1]> g (float[3] x) => (float[3] y)
    { y = nobody.Thing (x) }"""
    session = ReferenceSession(ir.from_proto(onnx.parser.parse_model(text)), "some.onnx")
    with pytest.raises(gradfuse.ModelError, match=r"^some\.onnx: onnxruntime cannot run the model in float64: .*$"):
        session.run({"x": np.zeros(3, np.float32)})


def _outputs(text: str, **feeds: np.ndarray[Any, Any]) -> tuple[list[np.ndarray[Any, Any]], int]:
    """Return what a model gives in float64, and how many sessions onnxruntime opens for it."""
    opened = 0

    class Counted(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal opened
            opened += 1
            super().__init__(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", Counted)
        return in_float64(text, **feeds), opened


X = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -3.0]], np.float32)
SQUARES = "g (float[2,3] x) => (float[2,3] y) { a = Mul (x, x) b = Softsign (a) c = %s d = Softsign (c) y = %s }"


@pytest.mark.parametrize(
    "first, second, opened, expected",
    [
        ("Mul (b, b)", "Mul (d, d)", 1, lambda a, b, c, d: d * d),
        ("Mul (b, x)", "Mul (d, x)", 2, lambda a, b, c, d: d * X),
        ("Mul (x, b)", "Mul (d, x)", 2, lambda a, b, c, d: d * X),
        ("Sub (b, x)", "Sub (x, d)", 2, lambda a, b, c, d: X - d),
        ("LeakyRelu <alpha = 0.5> (b)", "Mul (d, d)", 1, lambda a, b, c, d: d * d),
    ],
)
def test_layers_that_are_almost_alike(first: str, second: str, opened: int, expected: Any) -> None:
    (y,), count = _outputs(SQUARES % (first, second), x=X)
    x = X.astype(np.float64)

    def at(text: str, values: dict[str, Any]) -> Any:
        operator, arguments = text.split(" (")
        a, b = [values[one] for one in (arguments.rstrip(")").split(", ") * 2)[:2]]
        by_name = {"Mul": a * b, "Sub": a - b}
        return np.where(a < 0, a / 2, a) if operator.startswith("Leaky") else by_name[operator]

    a = x * x
    b = a / (1 + np.abs(a))
    c = at(first, {"x": x, "b": b})
    d = c / (1 + np.abs(c))
    np.testing.assert_allclose(y, expected(a, b, c, d), rtol=1e-12)
    assert count == opened


def test_layers_that_differ_by_attributes_types_or_shapes_are_not_taken_for_each_other() -> None:
    text = """g (float[2,3] x, int64[2,3] n) => (float[3,2] y, int64[2,3] m, float[2,1] s, float[1,3] t) {
        a = Transpose <perm = [1, 0]> (x) b = Softsign (a) c = Transpose <perm = [0, 1]> (b) y = Softsign (c)
        p = Softsign (x) m = Mul (n, n) q = Softsign (x) r = Mul (q, q) u = Softsign (r)
        s = ReduceSum <keepdims = 1> (u, k) v = Softsign (x) t = ReduceSum <keepdims = 1> (v, l)
    }"""
    text = text.replace("{", "<int64[1] k = {1}, int64[1] l = {0}> {", 1)
    n = np.array([[2**53 + 1, 2, 3], [4, 5, 6]])
    (y, m, s, t), _ = _outputs(text, x=X, n=n)
    x = X.astype(np.float64)

    def soft(x: Any) -> Any:
        return x / (1 + np.abs(x))

    np.testing.assert_allclose(y, soft(soft(x.T)), rtol=1e-12)
    np.testing.assert_array_equal(m, n * n)
    np.testing.assert_allclose(s, soft(soft(x) ** 2).sum(1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(t, soft(x).sum(0, keepdims=True), rtol=1e-12)


def test_layers_that_draw_with_one_seed_draw_the_same() -> None:
    draw = "RandomUniformLike <seed = 3.0, dtype = 11>"
    text = f"""g (double[2,3] x) => (double[2,3] y, double[2,3] z) {{
        a = {draw} (x) y = Softsign (a) b = {draw} (x) z = Softsign (b)
    }}"""
    (y, z), _ = _outputs(text, x=X.astype(np.float64))
    np.testing.assert_array_equal(y, z)


def test_branches_that_have_names_of_their_own() -> None:
    text = """g (float[2,3] x, bool c) => (float[2,3] y) {
        a = Mul (x, x) b = Softsign (a)
        y = If (c) <then_branch = t () => (float[2,3] o) { 0 = Mul (b, b) o = Add (0, x) },
                    else_branch = e () => (float[2,3] p) { p = Mul (b, x) }>
    }""".replace("0", "n0")
    x = X.astype(np.float64)
    b = x * x / (1 + x * x)
    for c, wanted in ((True, b * b + x), (False, b * x)):
        (y,), _ = _outputs(text, x=X, c=np.array(c))
        np.testing.assert_allclose(y, wanted, rtol=1e-12)


def test_weights_are_converted_part_by_part_and_outputs_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_LARGE", 10)
    monkeypatch.setattr(reference, "_LARGEST_PART", 40)
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[3,5] x, float[5,5] a, float[5,5] b)
    => (float[3,5] y, float[5,5] c, float[5,5] d, float[5,5] a)
    <float[5,5] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25}>
    { p = MatMul (x, a) q = MatMul (p, w) e = Erf (q) y = MatMul (e, b) c = Mul (a, b) d = Add (c, w) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    session = ReferenceSession(model, "model")
    assert len(session._parts) > 3
    x, a, b = torch.randn(3, 5), torch.randn(5, 5), torch.randn(5, 5)
    w = torch.arange(1.0, 26.0, dtype=torch.float64).view(5, 5)
    feeds = {name: one.numpy() for name, one in {"x": x, "a": a, "b": b}.items()}
    c = a.double() * b.double()
    expected = {
        "y": torch.erf(x.double() @ a.double() @ w) @ b.double(),
        "c": c,
        "d": c + w,
        "a": a.double(),
    }
    results = session.run(feeds)
    assert list(results) == ["y", "c", "d", "a"]
    for name, array in results.items():
        assert_same(array, expected[name])
    taken: list[str] = []
    shares: list[float] = []

    def take(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        taken.append(name)
        return np.asarray(array.sum(keepdims=True))

    sums = session.run(feeds, take, shares.append)
    assert sorted(taken) == ["a", "c", "d", "y"] and shares == sorted(shares)
    for name, array in sums.items():
        assert_same(array, expected[name].sum().view(1, 1))
    np.testing.assert_array_equal(feeds["a"], a.numpy())


def test_large_values_in_bodies_are_computed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_LARGE", 10)
    monkeypatch.setattr(reference, "_LARGEST_VALUES", 30)
    text = """<ir_version: 10, opset_import: ["" : 20, "local" : 1]> g (float[4,5] x, float[4,5] y) => (float[4,5] z)
    { z = local.f (x, y) }
    <domain: "local", opset_import: ["" : 20]> f (x, y) => (z)
    { e = Erf (x) m = Mul (e, y) s = Sin (m) b = Less (s, x) z = Where (b, s, y) }"""
    session = ReferenceSession(ir.from_proto(onnx.parser.parse_model(text)), "model")
    assert len(session._parts) == 5
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    sines = (torch.erf(x.double()) * y.double()).sin()
    results = session.run({"x": x.numpy(), "y": y.numpy()})
    assert_same(results["z"], torch.where(sines < x.double(), sines, y.double()))


def test_an_output_gives_back_its_memory_while_others_are_kept() -> None:
    text = """<ir_version: 9, opset_import: ["" : 18]>
        g (double[n] x) => (double[n] y, bool[n] z, double[n] w) {
            y = Exp(x)
            z = Greater(x, y)
            w = Sqrt(x)
        }
    """
    session = Session(ir.from_proto(onnx.parser.parse_model(text)), "model")
    x = np.linspace(0, 1, 8 * 2**20)  # 64 MiB
    outputs = session.run({"x": x})
    before = memory.resident()
    del outputs["y"]
    after = memory.resident()
    assert before is not None and after is not None
    assert before - after > 2**25
    np.testing.assert_array_equal(outputs["w"], np.sqrt(x))
    assert not outputs["z"].any()


def test_an_input_that_is_an_output_keeps_its_memory() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[2,3] x, bool f) => (float[2,3] y, float[2,3] x, bool n)
    { y = Neg (x) n = Not (f) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    # Not contiguous, so that onnxruntime gets a copy.
    x = np.arange(6, dtype=np.float32).reshape(3, 2).T
    results = Session(model, "model").run({"x": x, "f": np.array(True)})
    np.testing.assert_array_equal(results["x"], x)
    np.testing.assert_array_equal(results["y"], -x)
    assert not results["n"] and not np.shares_memory(results["x"], x)


_LONG_RUN = """
import signal
import numpy as np, onnx.parser, onnx_ir as ir
from gradfuse.checking.execution import Session
from gradfuse.checking.reference import ReferenceSession
nodes = " ".join(f"x{k + 1} = MatMul (x{k}, x0)" for k in range(300))
text = '<ir_version: 10, opset_import: ["" : 20]> g (float[1024,1024] x0) => (float[1024,1024] x300) {' + nodes + "}"
model = ir.from_proto(onnx.parser.parse_model(text))
session = KIND(model, "model")
# What runs in the background may have been told to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
print("begins", flush=True)
for _ in range(10):
    session.run({"x0": np.zeros((1024, 1024), np.float32)})
"""


@pytest.mark.parametrize("kind", ["ReferenceSession", "Session"])
def test_ctrl_c_ends_a_long_run(kind: str) -> None:
    command = [sys.executable, "-c", _LONG_RUN.replace("KIND", kind)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == b"begins\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            # It would go on for a minute.
            process.wait(timeout=10)
            assert b"KeyboardInterrupt" in process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize("transposes_a", [0, 1])
def test_products_of_transposed_matrices(transposes_a: int) -> None:
    """A matrix that Gemm and others read, one that it transposes again, and one that is an output as well."""
    text = f"""agraph (double[3,5] a, double[4,5] b) => (double[?,?] y, double[5,3] ta, double[5,4] doubled) {{
        ta = Transpose<perm=[1, 0]>(a)
        tb = Transpose(b)
        doubled = Add(tb, tb)
        again = Identity(a)
        {"y = Gemm<transA=1>(ta, tb)" if transposes_a else "y = Gemm(again, tb)"}
    }}"""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 5)), rng.standard_normal((4, 5))
    y, transposed, doubled = in_float64(text, a=a, b=b)
    np.testing.assert_allclose(y, a @ b.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(transposed, a.T)
    np.testing.assert_array_equal(doubled, 2 * b.T)


def test_a_transposed_matrix_that_is_asked_for_is_returned() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        net (double[3, 5] a, double[4, 5] b) => (double[3, 4] y) { t = Transpose<perm=[1, 0]>(b)  y = Gemm(a, t) }
    """)
    )
    a, b = np.ones((3, 5)), np.arange(20.0).reshape(4, 5)
    results = ReferenceSession(model, "model", ["t", "y"]).run({"a": a, "b": b})
    np.testing.assert_array_equal(results["t"], b.T)
    np.testing.assert_array_equal(results["y"], a @ b.T)


def test_objects_that_are_older_than_an_export_of_much_are_collected_after_it() -> None:
    # The suite has frozen what it has made so far, as a user may.
    frozen = gc.get_freeze_count()
    assert frozen
    with memory.sparing(large=True):
        pass
    assert gc.get_freeze_count() == frozen
    gc.unfreeze()
    try:
        with memory.sparing(large=True):
            assert gc.get_freeze_count()
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()
