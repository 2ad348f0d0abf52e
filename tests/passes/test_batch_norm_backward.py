"""The gradients of batch normalization in training mode, as several producers write them, become one operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from producers import run

import gradfuse
from gradfuse import fuse, optimizers
from gradfuse.ort_training import operators as training_operators
from gradfuse.passes.report import Report
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

Array = npt.NDArray[Any]
COMPUTED_SHARE = (
    "size = Size(x) channels = Size(invstd) each = Div(size, channels) real = Cast<to = 1>(each) "
    "share = Reciprocal(real)"
)
SHAPES = {2: (6, 5), 3: (4, 3, 7), 4: (3, 4, 5, 2), 5: (2, 3, 2, 3, 2)}


def decomposition(rank: int, axes: str, count: str, *, weighted: bool, gated: bool, of_mean: bool) -> str:
    """torch's decomposition of aten::native_batch_norm_backward, node by node, and of threshold_backward before it."""
    spatial = f"[{','.join(str(axis) for axis in (0, *range(2, rank)))}]"
    column = f"column = Constant<value_ints = {spatial}>()"
    nodes = [
        column,
        f"axes = Constant<value_ints = {axes}>()",
        "zero = Constant<value_float = 0.0>() cut = LessOrEqual(relu, zero) g = Where(cut, zero, dy)"
        if gated
        else "g = Identity(dy)",
        count,
        "m = Identity(mean)" if of_mean else "total = ReduceSum<keepdims = 0>(x, axes) m = Mul(total, share)",
        "m_column = Unsqueeze(m, column)  r_column = Unsqueeze(invstd, column)",
        "grad_bias = ReduceSum<keepdims = 0>(g, axes)  d = Sub(x, m_column)  gd = Mul(g, d)",
        "gd_sum = ReduceSum<keepdims = 0>(gd, axes)  mean_g = Mul(grad_bias, share)  mean_gd = Mul(gd_sum, share)",
        "square = Mul(invstd, invstd)  slope = Mul(mean_gd, square)",
        "scale = Mul(invstd, weight)" if weighted else "scale = Identity(invstd)",
        "mean_column = Unsqueeze(mean_g, column)  slope_column = Unsqueeze(slope, column)",
        "scale_column = Unsqueeze(scale, column)  of_variance = Mul(d, slope_column)  left = Sub(g, of_variance)",
        "centred = Sub(left, mean_column)  grad_input = Mul(centred, scale_column)",
        "grad_weight = Mul(gd_sum, invstd)",
    ]
    return "\n".join(nodes)


def onnx_model(text: str, shape: tuple[Any, ...], opset: int = 18) -> onnx.ModelProto:
    whole, vector = f"float[{','.join(map(str, shape))}]", f"float[{shape[1]}]"
    inputs = [f"{whole} {n}" for n in ("dy", "x", "relu")] + [f"{vector} {n}" for n in ("weight", "mean", "invstd")]
    outputs = f"{whole} grad_input, {vector} grad_weight, {vector} grad_bias"
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> '
        f"backward ({', '.join(inputs)}) => ({outputs}) {{ {text} }}"
    )


def feeds(shape: tuple[int, ...], seed: int = 0) -> dict[str, Array]:
    numbers = np.random.default_rng(seed)
    x = numbers.standard_normal(shape) + 1
    axes = tuple(axis for axis in range(len(shape)) if axis != 1)
    values = {
        "dy": numbers.standard_normal(shape),
        "x": x,
        "relu": np.maximum(numbers.standard_normal(shape), 0),
        "weight": numbers.standard_normal(shape[1]),
        "mean": x.mean(axes),
        "invstd": 1 / np.sqrt(x.var(axes) + 1e-5),
    }
    return {name: array.astype(np.float32) for name, array in values.items()}


def of_torch(arrays: Mapping[str, Array], dtype: torch.dtype, *, weighted: bool, gated: bool) -> dict[str, Array]:
    t = {name: torch.from_numpy(array).to(dtype) for name, array in arrays.items()}
    dy = torch.ops.aten.threshold_backward(t["dy"], t["relu"], 0) if gated else t["dy"]
    results = torch.ops.aten.native_batch_norm_backward(
        *(dy, t["x"], t["weight"] if weighted else None, None, None, t["mean"], t["invstd"]),
        train=True, eps=1e-5, output_mask=[True, weighted, weighted],
    )  # fmt: skip
    names = ("grad_input", "grad_weight", "grad_bias") if weighted else ("grad_input",)
    return {name: value.numpy() for name, value in zip(names, results, strict=False)}


def fused(model: Any) -> tuple[onnx.ModelProto, Report]:
    result = fuse(model, policy="all")
    onnx.checker.check_model(result.model, full_check=True)
    return result.model, result.report


def operators(report: Report) -> list[str]:
    return [fusion.op for fusion in report.fusions if fusion.op == "BatchNormBackward"]


def require_backward(model: onnx.ModelProto, shape: tuple[int, ...], *, weighted: bool, gated: bool) -> None:
    result, report = fused(model)
    assert operators(report) == ["BatchNormBackward"], report
    arrays = feeds(shape)
    exact, native = (of_torch(arrays, d, weighted=weighted, gated=gated) for d in (torch.float64, torch.float32))
    results = run(result, {v.name: arrays[v.name] for v in model.graph.input})
    for name, value in exact.items():
        terms = float(np.abs(arrays["dy"]).sum())
        assert_gradients_close(results[name], native[name], value, np.float32, terms=terms)


@settings(max_examples=8)
@given(st.sampled_from(sorted(SHAPES)), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_torchs_decomposition(rank: int, weighted: bool, gated: bool, of_mean: bool, dynamic: bool) -> None:
    shape = SHAPES[rank]
    count = shape[0] * int(np.prod(shape[2:]))
    axes = f"[{','.join(str(axis) for axis in (0, *range(2, rank)))}]"
    known = f"share = Constant<value = float {{{1 / count!r}}}>()"
    text = decomposition(
        rank, axes, COMPUTED_SHARE if dynamic else known, weighted=weighted, gated=gated, of_mean=of_mean
    )
    given_shape = ("N", shape[1], *shape[2:]) if dynamic else shape
    model = onnx_model(text, given_shape)
    require_backward(model, shape, weighted=weighted, gated=gated)


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_channels_that_are_last(rank: int, gated: bool, dynamic: bool) -> None:
    shape = SHAPES[rank]
    share = f"share = Constant<value = float {{{1 / (shape[0] * int(np.prod(shape[2:])))!r}}}>()"
    if dynamic:
        share = COMPUTED_SHARE
    ahead = f"[{','.join(map(str, range(rank - 1)))}]"
    text = decomposition(rank, ahead, share, weighted=True, gated=gated, of_mean=True)
    column = f"column = Constant<value_ints = [{','.join(str(axis) for axis in (0, *range(2, rank)))}]>"
    assert column in text
    text = text.replace(column, f"column = Constant<value_ints = {ahead}>")
    last = (*shape[:1], *shape[2:], shape[1])
    declared = ",".join(map(str, ("N", *last[1:]) if dynamic else last))
    model = onnx_model(text, shape)
    whole = onnx.parser.parse_graph(f"g (float[{declared}] x) => (float[{declared}] y) {{ y = Identity(x) }}")
    for value in (*model.graph.input[:3], model.graph.output[0]):
        value.type.CopyFrom(whole.input[0].type)
    result, report = fused(model)
    assert operators(report) == ["BatchNormBackward"], report
    arrays = feeds(shape)
    exact, native = (of_torch(arrays, d, weighted=True, gated=gated) for d in (torch.float64, torch.float32))
    given_last = {name: np.moveaxis(array, 1, -1) if array.ndim > 1 else array for name, array in arrays.items()}
    results = run(result, {v.name: given_last[v.name] for v in model.graph.input})
    for name, value in exact.items():
        got = np.moveaxis(results[name], -1, 1) if value.ndim > 1 else results[name]
        assert_gradients_close(got, native[name], value, np.float32, terms=float(np.abs(arrays["dy"]).sum()))


def test_means_over_pixels_and_then_over_the_batch() -> None:
    text = decomposition(4, "[0,2,3]", COMPUTED_SHARE, weighted=True, gated=False, of_mean=False)
    changes = {
        "total = ReduceSum<keepdims = 0>(x, axes) m = Mul(total, share)": ("m", "x"),
        "mean_g = Mul(grad_bias, share)": ("mean_g", "g"),
        "mean_gd = Mul(gd_sum, share)": ("mean_gd", "gd"),
    }
    for old, (name, of) in changes.items():
        assert old in text
        pooled = f"{name}_pooled = GlobalAveragePool({of})  {name}_batch = ReduceMean<axes = [0]>({name}_pooled)"
        text = text.replace(
            old, f"{pooled}  {name}_flat = Constant<value_ints = [-1]>()  {name} = Reshape({name}_batch, {name}_flat)"
        )
    require_backward(onnx_model(text, SHAPES[4], opset=17), SHAPES[4], weighted=True, gated=False)


def test_sums_of_what_was_normalized_as_kernels_have_them() -> None:
    """No difference from the mean: (g - sum(g) / n - x k + m k) r w, where k = (sum(g x) - m sum(g)) r^2 / n."""
    text = """
        axes = Constant<value_ints = [0, 2]>()  n = Constant<value_float = 28.0>()
        gx = Mul(dy, x)  of_gx = ReduceSum<keepdims = 0>(gx, axes)  sum_g = ReduceSum<keepdims = 0>(dy, axes)
        m_g = Mul(mean, sum_g)  dot = Sub(of_gx, m_g)  r2 = Mul(invstd, invstd)  slope = Mul(dot, r2)
        k = Div(slope, n)  mean_g = Div(sum_g, n)  mk = Mul(mean, k)  rw = Mul(invstd, weight)
        column = Constant<value_ints = [0, 2]>()  k_column = Unsqueeze(k, column)
        mean_column = Unsqueeze(mean_g, column)  mk_column = Unsqueeze(mk, column)  rw_column = Unsqueeze(rw, column)
        xk = Mul(x, k_column)  left = Sub(dy, mean_column)  less = Sub(left, xk)  all = Add(less, mk_column)
        grad_input = Mul(all, rw_column)  grad_weight = Mul(dot, invstd)  grad_bias = Identity(sum_g)"""
    require_backward(onnx_model(text, SHAPES[3]), SHAPES[3], weighted=True, gated=False)


def test_sums_of_products_by_einsum() -> None:
    share = f"share = Constant<value = float {{{1 / 24!r}}}>()"
    text = decomposition(4, "[0,2,3]", share, weighted=True, gated=False, of_mean=True)
    old = "gd = Mul(g, d)\ngd_sum = ReduceSum<keepdims = 0>(gd, axes)"
    assert old in text
    text = text.replace(old, 'gd_sum = Einsum<equation = "nchw,nchw->c">(g, d)')
    require_backward(onnx_model(text, (3, 4, 4, 2)), (3, 4, 4, 2), weighted=True, gated=False)


def test_sizes_that_are_too_large_to_be_run() -> None:
    """The share 1 / (16 * 48 * 48) goes with the sizes in the smaller ones that prove the match."""
    share = f"share = Constant<value = float {{{1 / (16 * 48 * 48)!r}}}>()"
    text = decomposition(4, "[0,2,3]", share, weighted=True, gated=False, of_mean=True)
    assert operators(fused(onnx_model(text, (16, 64, 48, 48)))[1]) == ["BatchNormBackward"]
    wrong = text.replace(repr(1 / (16 * 48 * 48)), repr(1 / (16 * 48 * 47)))
    assert not operators(fused(onnx_model(wrong, (16, 64, 48, 48)))[1])


@pytest.mark.parametrize("shape", [(6, 5), (3, 4, 5, 2), ("N", 4, 5, 2)])
def test_the_operator_of_onnxruntime_training(shape: tuple[Any, ...]) -> None:
    text = """
        dx, dw, db = com.microsoft.BatchNormalizationGrad<epsilon = 0.00001>(dy, x, weight, mean, invstd)
        grad_input = Identity(dx)  grad_weight = Identity(dw)  grad_bias = Identity(db)
    """
    result, report = fused(onnx_model(text, shape))
    assert operators(report) == ["BatchNormBackward"], report
    arrays = feeds(tuple(3 if size == "N" else size for size in shape))
    exact, native = (of_torch(arrays, d, weighted=True, gated=False) for d in (torch.float64, torch.float32))
    results = run(result, {v.name: arrays[v.name] for v in result.graph.input})
    for name, value in exact.items():
        terms = float(np.abs(arrays["dy"]).sum())
        assert_gradients_close(results[name], native[name], value, np.float32, terms=terms)


ORT = """
    y, new_mean, new_var, saved_mean, saved_invstd = com.microsoft.BatchNormInternal<epsilon = 0.00001, momentum = 0.9>(
        x, weight, mean, mean, invstd)
    out = Relu(y)
    grad_input, grad_weight, grad_bias = com.microsoft.BatchNormalizationGrad<epsilon = 0.00001>(
        dy, x, weight, saved_mean, saved_invstd)
"""


@pytest.mark.parametrize("shape", [(6, 5, 1, 1), (3, 4, 5, 2), (2, 3, 7)])
def test_onnxruntime_trainings_operators_in_standard_nodes(shape: tuple[int, ...]) -> None:
    model = ir.from_proto(onnx_model(ORT, shape))
    training_operators.replace(model.graph, "model")
    plain = ir.to_proto(model)
    require_backward(plain, shape, weighted=True, gated=False)


def classifier(batch: str | int) -> onnx.ModelProto:
    shapes = {"w": (5, 3, 3, 3), "s": (5,), "b": (5,), "rm": (5,), "rv": (5,), "a": (5, 4)}
    given = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> f (float[{batch},3,6,6] x) => (float[{batch},4] y) <{given}> {{'
        "c = Conv<pads = [1, 1, 1, 1]>(x, w) n = BatchNormalization(c, s, b, rm, rv) r = Relu(n) "
        "g = GlobalAveragePool(r) f = Flatten(g) y = MatMul(f, a) }"
    )
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = np.abs(numbers.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("batch", ["N", 8])
def test_steps_that_were_built_without_fusing(batch: str | int) -> None:
    """There the gradient goes through mean and variance node by node, and has sums that are 0 for a mean."""
    options: dict[str, Any] = {"optimizer": optimizers.SGD(lr=0.1), "train_batch_norm": True}
    plain = gradfuse.build_training_step(classifier(batch), "cross_entropy", fuse=False, **options)
    model, report = fused(plain.model)
    assert operators(report) == ["BatchNormBackward"]
    numbers = np.random.default_rng(1)
    x, y = numbers.standard_normal((8, 3, 6, 6)).astype(np.float32), numbers.integers(0, 4, 8)
    given = {**plain.parameters, **plain.buffers, **plain.hyperparameters}
    given |= {plain.input_names[0]: x, plain.target_names[0]: y}
    wanted, got = run(plain.model, given), run(model, given)
    for name, value in wanted.items():
        assert_gradients_close(got[name], value, value.astype(np.float64), value.dtype, terms=16.0)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(4)
        self.last = torch.nn.Conv2d(4, 3, 3)
        self.end = torch.nn.BatchNorm2d(3, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.end(self.last(hidden)).amax((2, 3))  # type: ignore[no-any-return]


@pytest.mark.long
def test_a_step_that_torch_exported() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, 6, 6), torch.randint(0, 3, (4,))
    net = Net()
    step = gradfuse.export_training_step(
        net, torch.nn.functional.cross_entropy, (x, y), fuse=False, dynamic_shapes=({0: "N"}, {0: "N"})
    )
    model, report = fused(step.model)
    assert operators(report) == ["BatchNormBackward"] * 2
    assert {f.rule for f in report.fusions if f.op == "BatchNormBackward"} == {
        "batch-norm-relu-backward",
        "batch-norm-backward",
    }
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        copy = Net()
        copy.load_state_dict(net.state_dict())
        copy.to(dtype)
        named = dict(copy.named_parameters())
        values = torch.autograd.grad(torch.nn.functional.cross_entropy(copy(x.to(dtype)), y), list(named.values()))
        gradients[dtype] = {f"{name}.grad": value.numpy() for name, value in zip(named, values, strict=True)}
    given = {**step.parameters, **step.buffers}
    given |= {step.input_names[0]: x.numpy(), step.target_names[0]: y.numpy()}
    results = run(model, given)
    for name, exact in gradients[torch.float64].items():
        assert_gradients_close(results[name], gradients[torch.float32][name], exact, np.float32, terms=8.0)


ALMOST = {
    "a mean over fewer elements": [(f"{1 / 30!r}", f"{2 / 30!r}")],
    "no part of the variance": [("left = Sub(g, of_variance)", "left = Identity(g)")],
    "no part of the mean": [("centred = Sub(left, mean_column)", "centred = Identity(left)")],
    "a part of the mean that is added": [("centred = Sub(left", "centred = Add(left")],
    "one inverse deviation in the slope": [("square = Mul(invstd, invstd)", "square = Identity(invstd)")],
    "the weight in the slope": [("square = Mul(invstd, invstd)", "square = Mul(invstd, weight)")],
    "no scale": [("grad_input = Mul(centred, scale_column)", "grad_input = Identity(centred)")],
    "the weight in place of the inverse deviation": [("scale = Mul(invstd, weight)", "scale = Mul(weight, weight)")],
    "another gradient in the sum": [("gd = Mul(g, d)", "gd = Mul(relu, d)")],
    "another gradient in the mean": [
        ("mean_g = Mul(grad_bias, share)", "o = ReduceSum<keepdims = 0>(relu, axes) mean_g = Mul(o, share)")
    ],
    "another mean in the sum": [
        ("gd = Mul(g, d)", "e_column = Unsqueeze(weight, column) e = Sub(x, e_column) gd = Mul(g, e)")
    ],
    "what is not centred": [("gd = Mul(g, d)", "gd = Mul(g, x)")],
}


def weighted_decomposition(*, gated: bool = False) -> str:
    share = f"share = Constant<value = float {{{1 / 30!r}}}>()"
    return decomposition(4, "[0,2,3]", share, weighted=True, gated=gated, of_mean=True)


@pytest.mark.parametrize("name", ALMOST)
def test_gradients_that_are_almost_those_stay(name: str) -> None:
    shape = (3, 4, 5, 2)
    text = weighted_decomposition()
    for old, new in ALMOST[name]:
        assert old in text
        text = text.replace(old, new)
    model = onnx_model(text, shape)
    result, report = fused(model)
    assert not operators(report)
    arrays = feeds(shape)
    wanted, got = run(model, arrays), run(result, arrays)
    for output, value in wanted.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-5, atol=1e-5)


def test_statistics_of_a_batch_of_any_size() -> None:
    text = f"""
        {COMPUTED_SHARE}
        axes = Constant<value_ints = [0, 2, 3]>()  column = Constant<value_ints = [1, 5, 1, 1]>()
        w = Reshape(weight, column)  eps = Constant<value_float = 1e-5>()
        total = ReduceSum(x, axes)  m = Mul(total, share)  d = Sub(x, m)  square = Mul(d, d)
        squares = ReduceSum(square, axes)  variance = Mul(squares, share)  more = Add(variance, eps)  root = Sqrt(more)
        y = Div(d, root)  dy_y = Mul(dy, y)  grad_weight = ReduceSum<keepdims = 0>(dy_y, axes)
        grad_bias = ReduceSum<keepdims = 0>(dy, axes)  s = Mul(dy, w)  s_sum = ReduceSum(s, axes)
        s_mean = Mul(s_sum, share)  sy = Mul(s, y)  sy_sum = ReduceSum(sy, axes)  sy_mean = Mul(sy_sum, share)
        left = Sub(s, s_mean)  through = Mul(y, sy_mean)  inside = Sub(left, through)  grad_input = Div(inside, root)
    """.replace("5, 1, 1]", f"{SHAPES[4][1]}, 1, 1]")
    model = onnx_model(text, ("N", *SHAPES[4][1:]))
    require_backward(model, SHAPES[4], weighted=True, gated=False)
    nothing = feeds(SHAPES[4]) | {name: np.zeros((0, *SHAPES[4][1:]), np.float32) for name in ("dy", "x", "relu")}
    wanted, got = run(model, nothing), run(fused(model)[0], nothing)
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array)


def test_explain_names_the_gradient_of_a_normalization_by_given_statistics() -> None:
    text = """
        column = Constant<value_ints = [0, 2, 3]>()  m = Unsqueeze(mean, column)  r = Unsqueeze(invstd, column)
        d = Sub(x, m)  y = Mul(d, r)  share = Mul(dy, y)
        grad_weight = ReduceSum<keepdims = 0>(share, column)  grad_bias = ReduceSum<keepdims = 0>(dy, column)
        scale = Mul(invstd, weight)  scales = Unsqueeze(scale, column)  grad_input = Mul(dy, scales)
    """
    regions = gradfuse.explain(onnx_model(text, SHAPES[4])).regions
    assert any(region.op == "BatchNormBackward" and "its mean is given" in region.reason for region in regions), regions


def test_a_gate_at_another_number_stays_outside() -> None:
    shape = (3, 4, 5, 2)
    text = weighted_decomposition(gated=True).replace(
        "cut = LessOrEqual(relu, zero)", "six = Constant<value_float = 6.0>() cut = LessOrEqual(relu, six)"
    )
    result, report = fused(onnx_model(text, shape))
    assert operators(report) == ["BatchNormBackward"]
    (node,) = (node for node in result.graph.node if node.domain == "aclnn")
    assert "relu" not in node.input
    assert any(other.op_type == "Where" for other in result.graph.node)
