"""The gradients of layer and RMS normalization, as several producers write them, become one operator."""

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
from operators import SAMPLES
from producers import run

import gradfuse
from gradfuse import fuse
from gradfuse.ort_training import operators as training_operators
from gradfuse.passes.report import Report
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

Array = npt.NDArray[Any]
OP = "LayerNormBackward"


def whole_of(shape: tuple[Any, ...]) -> str:
    return f"float[{','.join(map(str, shape))}]"


def onnx_model(text: str, shape: tuple[Any, ...], first: int, opset: int = 18) -> onnx.ModelProto:
    whole, inner = whole_of(shape), whole_of(shape[first:])
    rows = whole_of((*shape[:first], *(1 for _ in shape[first:])))
    inputs = [f"{whole} {n}" for n in ("dy", "x", "other")] + [f"{inner} weight"]
    inputs += [f"{rows} {n}" for n in ("mean", "rstd", "third")]
    outputs = f"{whole} grad_input, {inner} grad_weight, {inner} grad_bias"
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> '
        f"backward ({', '.join(inputs)}) => ({outputs}) {{ {text} }}"
    )


def feeds(shape: tuple[int, ...], first: int, *, centred: bool = True) -> dict[str, Array]:
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal(shape) + 0.5
    axes = tuple(range(first, len(shape)))
    mean = x.mean(axes, keepdims=True)
    spread = np.square(x - mean if centred else x).mean(axes, keepdims=True)
    values = {
        "dy": numbers.standard_normal(shape),
        "x": x,
        "other": numbers.standard_normal(shape),
        "weight": numbers.standard_normal(shape[first:]),
        "mean": mean,
        "rstd": 1 / np.sqrt(spread + 1e-5),
        "third": numbers.standard_normal(mean.shape),
    }
    return {name: array.astype(np.float32) for name, array in values.items()}


def of_torch(
    arrays: Mapping[str, Array], dtype: torch.dtype, first: int, *, weighted: bool, centred: bool
) -> dict[str, Array]:
    t = {name: torch.from_numpy(array) for name, array in arrays.items()}
    results = SAMPLES[OP].oracle(
        t["dy"], t["x"], t["weight"] if weighted else None, t["mean"] if centred else None, t["rstd"],
        axis=first, dtype=dtype,
    )  # fmt: skip
    return dict(zip(("grad_input", "grad_weight", "grad_bias"), (one.numpy() for one in results), strict=True))


def fused(model: Any) -> tuple[onnx.ModelProto, Report]:
    result = fuse(model, policy="all")
    onnx.checker.check_model(result.model, full_check=True)
    return result.model, result.report


def masks(model: onnx.ModelProto) -> list[list[int]]:
    """What is wanted of each of the operators in a model."""
    nodes = [node for node in model.graph.node if node.op_type == OP]
    return [list(one.ints) for node in nodes for one in node.attribute if one.name == "output_mask"]


def require_backward(
    model: onnx.ModelProto, shape: tuple[int, ...], first: int, *, weighted: bool = True, centred: bool = True
) -> None:
    result, report = fused(model)
    assert masks(result) == [[1, 1, 1]], report
    arrays = feeds(shape, first, centred=centred)
    exact, native = (
        of_torch(arrays, d, first, weighted=weighted, centred=centred) for d in (torch.float64, torch.float32)
    )
    results = run(result, {v.name: arrays[v.name] for v in model.graph.input})
    for name, value in exact.items():
        terms = float(np.abs(arrays["dy"]).sum())
        assert_gradients_close(results[name], native[name], value, np.float32, terms=terms)


def axes_of(rank: int, first: int) -> str:
    inner, outer = ([str(k) for k in ks] for ks in (range(first, rank), range(first)))
    return f"inner = Constant<value_ints = [{','.join(inner)}]>() outer = Constant<value_ints = [{','.join(outer)}]>() "


MEAN_OF_X = "m = ReduceMean<keepdims = 1>(x, inner)"
"""How a graph has the mean where it computes it."""


def by_rule(rank: int, first: int, *, weighted: bool, of_mean: bool) -> str:
    """As a training step without fused operators, to_stock and textbooks write it."""
    return axes_of(rank, first) + "\n".join(
        [
            "m = Identity(mean)" if of_mean else MEAN_OF_X,
            "d = Sub(x, m)  y = Mul(d, rstd)",
            "s = Mul(dy, weight)" if weighted else "s = Identity(dy)",
            "mean_s = ReduceMean<keepdims = 1>(s, inner)  left = Sub(s, mean_s)  sy = Mul(s, y)",
            "mean_sy = ReduceMean<keepdims = 1>(sy, inner)  through = Mul(y, mean_sy)  rest = Sub(left, through)",
            "grad_input = Mul(rstd, rest)",
            "dy_y = Mul(dy, y)  grad_weight = ReduceSum<keepdims = 0>(dy_y, outer)",
            "grad_bias = ReduceSum<keepdims = 0>(dy, outer)",
        ]
    )


def by_torch(rank: int, first: int, size: int, *, weighted: bool) -> str:
    """torch's decomposition of aten::native_layer_norm_backward, node by node."""
    return axes_of(rank, first) + "\n".join(
        [
            f"n = Constant<value_float = {float(size)}>()",
            "d = Sub(x, mean)  y = Mul(d, rstd)",
            "s = Mul(dy, weight)" if weighted else "s = Identity(dy)",
            "a = Mul(s, n)  b = ReduceSum<keepdims = 1>(s, inner)  sy = Mul(s, y)",
            "c = ReduceSum<keepdims = 1>(sy, inner)  e = Mul(y, c)  ab = Sub(a, b)  abe = Sub(ab, e)",
            "share = Div(rstd, n)  grad_input = Mul(share, abe)",
            "dy_y = Mul(dy, y)  grad_weight = ReduceSum<keepdims = 0>(dy_y, outer)",
            "grad_bias = ReduceSum<keepdims = 0>(dy, outer)",
        ]
    )


SHAPES = [((6, 5), 1), ((4, 3, 7), 2), ((4, 3, 7), 1), ((2, 3, 4, 5), 2), ((2, 3, 4, 5), 3)]


@settings(max_examples=12)
@given(st.sampled_from(SHAPES), st.booleans(), st.booleans(), st.booleans())
def test_the_gradient_with_means(
    case: tuple[tuple[int, ...], int], weighted: bool, of_mean: bool, dynamic: bool
) -> None:
    shape, first = case
    text = by_rule(len(shape), first, weighted=weighted, of_mean=of_mean)
    given_shape = ("N", *shape[1:]) if dynamic else shape
    require_backward(onnx_model(text, given_shape, first), shape, first, weighted=weighted)


@settings(max_examples=8)
@given(st.sampled_from(SHAPES), st.booleans(), st.booleans())
def test_torchs_decomposition(case: tuple[tuple[int, ...], int], weighted: bool, dynamic: bool) -> None:
    shape, first = case
    text = by_torch(len(shape), first, int(np.prod(shape[first:])), weighted=weighted)
    given_shape = ("N", *shape[1:]) if dynamic else shape
    require_backward(onnx_model(text, given_shape, first), shape, first, weighted=weighted)


def test_sums_without_the_axes_that_they_are_over() -> None:
    text = by_rule(3, 2, weighted=True, of_mean=True)
    for name in ("mean_s", "mean_sy"):
        operand = name.removeprefix("mean_")
        text = text.replace(
            f"{name} = ReduceMean<keepdims = 1>({operand}, inner)",
            f"{name}_flat = ReduceMean<keepdims = 0>({operand}, inner)  {name} = Unsqueeze({name}_flat, inner)",
        )
    require_backward(onnx_model(text, (4, 3, 7), 2), (4, 3, 7), 2)


ONES = """ones = Constant<value = float[7, 1] {1, 1, 1, 1, 1, 1, 1}>()  n = Constant<value_float = 7.0>()
square = Constant<value_ints = [7, 7]>()  one_image = Constant<value_ints = [1, 12, 7]>()
back = Constant<value_ints = [4, 3, 1]>()"""


@pytest.mark.parametrize(
    "mean",
    [
        "share = Div(ones, n)  $m = MatMul($x, share)",
        "sevenths = Expand(ones, square)  share = Div(sevenths, n)  $m = MatMul($x, share)",
        "$m = GlobalAveragePool($x)",
        "$m = AveragePool<kernel_shape = [7]>($x)",
        """rows = Constant<value_ints = [12, 1, 7]>() filter = Constant<value = float[1, 1, 7] {1, 1, 1, 1, 1, 1, 1}>()
        $r = Reshape($x, rows) $c = Conv($r, filter) $s = Div($c, n) $m = Reshape($s, back)""",
        """$r = Reshape($x, one_image)  $s = AveragePool<kernel_shape = [7]>($r)
        $m = Reshape($s, back)""",
        """flat = Constant<value_ints = [12, 7]>()  $r = Reshape($x, flat)
        $s = Gemm<alpha = 0.14285714285714285>($r, ones)  $m = Reshape($s, back)""",
    ],
)
def test_means_by_products_with_ones_and_by_pooling(mean: str) -> None:
    text = by_rule(3, 2, weighted=True, of_mean=False).replace(MEAN_OF_X, f"{ONES}  m = ReduceMean(x, inner)")
    text = text.replace("ReduceMean<keepdims = 1>", "ReduceMean")
    constants, _, of_each = mean.partition("$") if mean[0] != "$" else ("", "$", mean[1:])
    for name, operand in (("m", "x"), ("mean_s", "s"), ("mean_sy", "sy")):
        own = f"${of_each}".replace("$m", name).replace("$x", operand)
        own = own.replace("$r", f"{name}_rows").replace("$s", f"{name}_sums")
        own = own.replace("$c", f"{name}_ones")
        text = text.replace(f"{name} = ReduceMean({operand}, inner)", (constants if name == "m" else "") + own)
    require_backward(onnx_model(text, (4, 3, 7), 2), (4, 3, 7), 2)


def test_a_mean_that_was_multiplied_by_the_deviation() -> None:
    text = by_rule(3, 2, weighted=True, of_mean=True)
    text = text.replace("d = Sub(x, m)  y = Mul(d, rstd)", "xr = Mul(x, rstd)  mr = Mul(m, rstd)  y = Sub(xr, mr)")
    require_backward(onnx_model(text, (4, 3, 7), 2), (4, 3, 7), 2)


@pytest.mark.parametrize("of_mean", [True, False])
def test_two_numbers_a_row_in_which_the_mean_is_a_factor(of_mean: bool) -> None:
    """g r + a x + b, as kernels have it: they sum what they read, the input and the gradient."""
    text = (
        axes_of(3, 2)
        + f"""
        {"m = Identity(mean)" if of_mean else MEAN_OF_X}
        n = Constant<value_float = 7.0>()  s = Mul(dy, weight)  sx = Mul(s, x)
        ds = ReduceSum<keepdims = 1>(sx, inner)  db = ReduceSum<keepdims = 1>(s, inner)
        db_m = Mul(db, m)  less = Sub(db_m, ds)  r2 = Mul(rstd, rstd)  r3 = Mul(r2, rstd)
        cubed = Mul(less, r3)  a = Div(cubed, n)  a_m = Mul(a, m)  db_r = Mul(db, rstd)  share = Div(db_r, n)
        both = Add(a_m, share)  b = Neg(both)  sr = Mul(s, rstd)  ax = Mul(a, x)  srx = Add(sr, ax)
        grad_input = Add(srx, b)
        d = Sub(x, m)  y = Mul(d, rstd)  dy_y = Mul(dy, y)  grad_weight = ReduceSum<keepdims = 0>(dy_y, outer)
        grad_bias = ReduceSum<keepdims = 0>(dy, outer)"""
    )
    require_backward(onnx_model(text, (4, 3, 7), 2), (4, 3, 7), 2)


def test_channels_that_were_made_rows() -> None:
    """Batch normalization with its channels in front: a weight for each row."""
    rows = "means = ReduceMean<keepdims = 1>(x, inner) d = Sub(x, means) y = Mul(d, rstd)"
    text = (
        axes_of(2, 1)
        + f"""
        {rows}  one = ReduceMean<keepdims = 1>(dy, inner)  dy_y = Mul(dy, y)
        two = ReduceMean<keepdims = 1>(dy_y, inner)  through = Mul(y, two)  left = Sub(dy, one)
        rest = Sub(left, through)  r = Mul(rstd, third)  grad_input = Mul(r, rest)
        grad_weight = Identity(weight)  grad_bias = Identity(weight)"""
    )
    arrays = feeds((3, 12), 1)
    result, report = fused(onnx_model(text, (3, 12), 1))
    assert masks(result) == [[1, 0, 0]], report
    arrays["dy"], dy = arrays["dy"] * arrays["third"], arrays["dy"]
    exact, native = (of_torch(arrays, d, 1, weighted=False, centred=True) for d in (torch.float64, torch.float32))
    got = run(result, {**arrays, "dy": dy})["grad_input"]
    terms = float(np.abs(arrays["dy"]).sum())
    assert_gradients_close(got, native["grad_input"], exact["grad_input"], np.float32, terms=terms)


def test_sums_of_products_of_rows_by_einsum() -> None:
    text = by_rule(3, 2, weighted=True, of_mean=True)
    changes = {
        "sy = Mul(s, y)": "n = Constant<value_float = 7.0>()",
        "mean_sy = ReduceMean<keepdims = 1>(sy, inner)": """
            dot = Einsum<equation = "btd,btd->bt">(s, y)  column = Unsqueeze(dot, inner)  mean_sy = Div(column, n)""",
        "dy_y = Mul(dy, y)  grad_weight = ReduceSum<keepdims = 0>(dy_y, outer)": """
            grad_weight = Einsum<equation = "btd,btd->d">(dy, y)""",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    require_backward(onnx_model(text, (4, 3, 7), 2), (4, 3, 7), 2)


def test_without_a_mean_it_is_rms_normalization() -> None:
    text = by_rule(3, 2, weighted=True, of_mean=True)
    text = text.replace("d = Sub(x, m)", "d = Identity(x)").replace("left = Sub(s, mean_s)", "left = Identity(s)")
    require_backward(onnx_model(text, (4, 3, 7), 2), (4, 3, 7), 2, centred=False)
    (fusion,) = fused(onnx_model(text, (4, 3, 7), 2))[1].fusions
    assert fusion.rule == "rms-norm-backward"


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), ("N", 4, 6)])
@pytest.mark.parametrize("centred", [True, False])
def test_the_operators_of_onnxruntime_training(shape: tuple[Any, ...], centred: bool) -> None:
    """As they are, and in standard nodes."""
    first = len(shape) - 1
    outputs = "dx, dw, db" if centred else "dx, dw"
    op = f"com.microsoft.{'' if centred else 'Simplified'}LayerNormalizationGrad<axis = {first}, epsilon = 0.00001>"
    bias = "db" if centred else "ReduceSum<keepdims = 0>(dy, outer)"
    text = axes_of(len(shape), first) + (
        f"{outputs} = {op}(dy, x, weight, {'mean, ' if centred else ''}rstd)  grad_input = Identity(dx) "
        f"grad_weight = Identity(dw) grad_bias = {f'Identity({bias})' if centred else bias}"
    )
    model = onnx_model(text, shape, first)
    sizes = tuple(3 if size == "N" else size for size in shape)
    plain = ir.from_proto(model)
    training_operators.replace(plain.graph, "model")
    arrays = feeds(sizes, first, centred=centred)
    for one, found in ((model, [[1, 1, int(centred)]]), (ir.to_proto(plain), [[1, 1, 1]])):
        result, report = fused(one)
        assert masks(result) == found, report
        exact, native = (
            of_torch(arrays, d, first, weighted=True, centred=centred) for d in (torch.float64, torch.float32)
        )
        results = run(result, {v.name: arrays[v.name] for v in result.graph.input})
        for name, value in exact.items():
            terms = float(np.abs(arrays["dy"]).sum())
            assert_gradients_close(results[name], native[name], value, np.float32, terms=terms)


def test_a_weight_of_another_shape_keeps_the_operator_of_onnxruntime_training() -> None:
    text = (
        "one = Constant<value_ints = [1]>() w = Gather(weight, one) dx, dw, db = com.microsoft.LayerNormalizationGrad"
        "<axis = 1>(dy, x, w, mean, rstd)  grad_input = Identity(dx) grad_weight = Add(dw, weight) "
        "grad_bias = Add(db, weight)"
    )
    result = fuse(onnx_model(text, (4, 6), 1), policy="all")
    assert not masks(result.model), result.report


def network(batch: int | str, *, simplified: bool) -> onnx.ModelProto:
    op = "RMSNormalization" if simplified else "LayerNormalization"
    operands = "h, s" if simplified else "h, s, b"
    shapes = {"w": (6, 8), "s": (8,), "b": (8,), "a": (8, 4)}
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 23]> f (float[{batch},5,6] x) => (float[{batch},4] y) '
        f"<{', '.join(f'{whole_of(shape)} {name}' for name, shape in shapes.items())}> {{ h = MatMul(x, w) "
        f"n = {op}<axis = -1>({operands}) l = MatMul(n, a) "
        "axes = Constant<value_ints = [1]>() y = ReduceMean<keepdims = 0>(l, axes) }"
    )
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = numbers.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize("batch", ["N", 4])
def test_steps_that_were_built_without_fusing(batch: str | int, simplified: bool) -> None:
    plain = gradfuse.build_training_step(network(batch, simplified=simplified), "cross_entropy", fuse=False)
    model, report = fused(plain.model)
    assert masks(model) == [[1, 1, int(not simplified)]], report
    numbers = np.random.default_rng(1)
    x, y = numbers.standard_normal((4, 5, 6)).astype(np.float32), numbers.integers(0, 4, 4)
    given = {**plain.parameters, plain.input_names[0]: x, plain.target_names[0]: y}
    wanted, got = run(plain.model, given), run(model, given)
    for name, value in wanted.items():
        assert_gradients_close(got[name], value, value.astype(np.float64), value.dtype, terms=16.0)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.last = torch.nn.LayerNorm((5, 8), elementwise_affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return (self.last(hidden + self.first(x)) ** 3).mean(1)  # type: ignore[no-any-return]


@pytest.mark.long
def test_a_step_that_torch_exported() -> None:
    torch.manual_seed(0)
    net, x, y = Net(), torch.randn(4, 5, 6), torch.randint(0, 8, (4,))
    step = gradfuse.export_training_step(
        net, torch.nn.functional.cross_entropy, (x, y), fuse=False, dynamic_shapes=({0: "N"}, {0: "N"})
    )
    model, report = fused(step.model)
    assert masks(model) == [[1, 1, 1], [1, 0, 0]] or masks(model) == [[1, 0, 0], [1, 1, 1]], report
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        copy = Net()
        copy.load_state_dict(net.state_dict())
        copy.to(dtype)
        named = dict(copy.named_parameters())
        values = torch.autograd.grad(torch.nn.functional.cross_entropy(copy(x.to(dtype)), y), list(named.values()))
        gradients[dtype] = {f"{name}.grad": value.numpy() for name, value in zip(named, values, strict=True)}
    given = {**step.parameters, step.input_names[0]: x.numpy(), step.target_names[0]: y.numpy()}
    results = run(model, given)
    for name, exact in gradients[torch.float64].items():
        assert_gradients_close(results[name], gradients[torch.float32][name], exact, np.float32, terms=8.0)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_gradient_of_rms_normalization_node_by_node(shift: float) -> None:
    """As autodiff on graphs writes it: the deviation, its inverse and that one's derivative are values of their own."""
    text = axes_of(3, 2) + (
        f"""shift = Constant<value_float = {shift}>() eps = Constant<value_float = 0.001>()
        half = Constant<value_float = 0.5>() n = Constant<value_float = 7.0>()
        moved = Add(x, shift) square = Mul(moved, moved) spread = ReduceMean<keepdims = 1>(square, inner)
        added = Add(spread, eps) root = Sqrt(added) inverse = Reciprocal(root) y = Mul(x, inverse)
        s = Mul(dy, weight) direct = Mul(s, inverse) products = Mul(s, x)
        by_inverse = ReduceSum<keepdims = 1>(products, inner) squared = Mul(inverse, inverse) negated = Neg(squared)
        by_root = Mul(by_inverse, negated) slope = Div(half, root) by_spread = Mul(by_root, slope)
        share = Div(by_spread, n) twice = Add(share, share) indirect = Mul(twice, moved)
        grad_input = Add(direct, indirect)
        dy_y = Mul(dy, y)  grad_weight = ReduceSum<keepdims = 0>(dy_y, outer)
        grad_bias = ReduceSum<keepdims = 0>(dy, outer)"""
    )
    shape = (4, 3, 7)
    result, report = fused(onnx_model(text, shape, 2))
    # A deviation from another point than 0 is of another value than what it divides.
    assert masks(result) == ([[1, 1, 1]] if shift == 0 else []), report
    arrays = feeds(shape, 2)
    x, weight = (torch.from_numpy(arrays[name]).double().requires_grad_() for name in ("x", "weight"))
    inverse = torch.rsqrt((x + shift).square().mean(-1, keepdim=True) + 0.001)
    (x * inverse * weight * torch.from_numpy(arrays["dy"])).sum().backward()  # type: ignore[no-untyped-call]
    results = run(result, arrays)
    for name, exact in (("grad_input", x.grad), ("grad_weight", weight.grad)):
        assert exact is not None
        assert_gradients_close(results[name], exact.float(), exact, np.float32, terms=float(np.abs(arrays["dy"]).sum()))


ALMOST = {
    "no part of the deviation": ("rest = Sub(left, through)", "rest = Identity(left)"),
    "no part of the mean": ("left = Sub(s, mean_s)", "left = Identity(s)"),
    "a part of the mean that is added": ("left = Sub(s, mean_s)", "left = Add(s, mean_s)"),
    "a part of the deviation that is added": ("rest = Sub(left, through)", "rest = Add(left, through)"),
    "a sum in place of a mean": ("mean_sy = ReduceMean", "mean_sy = ReduceSum"),
    "a mean of another tensor": ("ReduceMean<keepdims = 1>(s, inner)", "ReduceMean<keepdims = 1>(other, inner)"),
    "a product with another tensor": ("sy = Mul(s, y)", "sy = Mul(other, y)"),
    "another mean in the product": ("sy = Mul(s, y)", "d2 = Sub(x, third) y2 = Mul(d2, rstd) sy = Mul(s, y2)"),
    "what is not centred in the product": ("sy = Mul(s, y)", "y2 = Mul(x, rstd) sy = Mul(s, y2)"),
    "what is not centred outside": ("through = Mul(y, mean_sy)", "y2 = Mul(x, rstd) through = Mul(y2, mean_sy)"),
    "an epsilon in the deviation": (
        "y = Mul(d, rstd)", "eps = Constant<value_float = 0.01>() r2 = Add(rstd, eps) y = Mul(d, r2)"
    ),
    "another deviation outside": ("grad_input = Mul(rstd, rest)", "grad_input = Mul(third, rest)"),
    "no deviation outside": ("grad_input = Mul(rstd, rest)", "grad_input = Identity(rest)"),
    "no deviation in the product": ("sy = Mul(s, y)", "sy = Mul(s, d)"),
    "no weight in the mean": ("ReduceMean<keepdims = 1>(s, inner)", "ReduceMean<keepdims = 1>(dy, inner)"),
    "no weight in the product": ("sy = Mul(s, y)", "sy = Mul(dy, y)"),
    "the weight twice": ("s = Mul(dy, weight)", "s1 = Mul(dy, weight) s = Mul(s1, weight) q = Identity(s1)"),
    "means over another axis": (MEAN_OF_X, "two = Constant<value_ints = [1]>() m = ReduceMean<keepdims = 1>(x, two)"),
    "a factor of two": ("through = Mul(y, mean_sy)", "y3 = Add(y, y) through = Mul(y3, mean_sy)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALMOST)
def test_gradients_that_are_almost_those_stay(name: str) -> None:
    shape, first = (4, 3, 7), 2
    old, new = ALMOST[name]
    text = by_rule(3, first, weighted=True, of_mean=old != MEAN_OF_X)
    assert old in text
    model = onnx_model(text.replace(old, new), shape, first)
    result, report = fused(model)
    arrays = feeds(shape, first)
    if name == "the weight twice":
        # Right, with the product as the gradient.
        assert masks(result) == [[1, 0, 0]]
    else:
        assert not masks(result), report
    wanted, got = run(model, arrays), run(result, arrays)
    for output, value in wanted.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 5, 5), ("N", 5, 5)], ids=str)
def test_a_weight_or_deviation_along_other_axes_stays(shape: tuple[Any, ...]) -> None:
    """Where all sizes are the same, only the axes tell them apart."""
    text = by_rule(3, 2, weighted=True, of_mean=True)
    column = "one = Constant<value_ints = [1]>() column = Unsqueeze(weight, one) "
    turned = "turned = Transpose<perm = [0, 2, 1]>(rstd) "
    for changed in (
        column + text.replace("s = Mul(dy, weight)", "s = Mul(dy, column)"),
        turned + text.replace("y = Mul(d, rstd)", "y = Mul(d, turned)"),
        turned + text.replace("grad_input = Mul(rstd, rest)", "grad_input = Mul(turned, rest)"),
    ):
        model = onnx_model(changed, shape, 2)
        result, _ = fused(model)
        arrays = feeds((5, 5, 5), 2)
        wanted, got = run(model, arrays), run(result, arrays)
        for output, value in wanted.items():
            np.testing.assert_allclose(got[output], value, rtol=1e-4, atol=1e-5)
        found = [node for node in result.graph.node if node.op_type == OP]
        assert all("weight" not in node.input and "column" not in node.input for node in found)


@pytest.mark.parametrize(
    "old, new, mask",
    [
        ("dy_y = Mul(dy, y)", "dy_y = Mul(other, y)", [1, 0, 1]),
        ("dy_y = Mul(dy, y)", "dy_y = Mul(dy, d)", [1, 0, 1]),
        ("ReduceSum<keepdims = 0>(dy, outer)", "ReduceSum<keepdims = 0>(s, outer)", [1, 1, 0]),
        ("ReduceSum<keepdims = 0>(dy, outer)", "ReduceMean<keepdims = 0>(dy, outer)", [1, 1, 0]),
    ],
)
def test_sums_that_are_others_stay(old: str, new: str, mask: list[int]) -> None:
    text = by_rule(3, 2, weighted=True, of_mean=True)
    assert old in text
    model = onnx_model(text.replace(old, new), (4, 3, 7), 2)
    result, report = fused(model)
    assert masks(result) == [mask], report
    arrays = feeds((4, 3, 7), 2)
    wanted, got = run(model, arrays), run(result, arrays)
    for output, value in wanted.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "total",
    [
        "grad_input = Sum(other, direct, through)",
        "grad_input = Sum(through, dy, direct, other)",
        "so_far = Add(other, direct) grad_input = Add(so_far, through)",
        "so_far = Add(through, other) grad_input = Add(direct, so_far)",
    ],
)
def test_the_gradient_is_found_among_residual_sums(total: str) -> None:
    """What differentiation adds up where the input of a normalization goes on beside it, as in every Transformer."""
    shape = (2, 3, 8)
    model = onnx_model(
        f"""{axes_of(3, 2)}
        y = Mul(x, rstd)  weighted = Mul(dy, weight)  direct = Mul(weighted, rstd)
        product = Mul(weighted, x)  sums = ReduceSum<keepdims = 1>(product, inner)
        square = Mul(rstd, rstd)  cube = Mul(square, rstd)  scaled = Mul(sums, cube)
        share = Constant<value_float = -0.125>()  rows = Mul(scaled, share)  through = Mul(rows, x)
        {total}
        products = Mul(dy, y)  grad_weight = ReduceSum<keepdims = 0>(products, outer)
        grad_bias = ReduceSum<keepdims = 0>(dy, outer)""",
        shape,
        2,
    )
    result, report = fused(model)
    assert masks(result) == [[1, 1, 1]], report
    assert len(result.graph.node) == 2, "nothing is left of the gradient but the sum"
    arrays = feeds(shape, 2, centred=False)
    exact = of_torch(arrays, torch.float64, 2, weighted=True, centred=False)["grad_input"] + arrays["other"]
    native = of_torch(arrays, torch.float32, 2, weighted=True, centred=False)["grad_input"] + arrays["other"]
    if "dy" in total:
        exact, native = exact + arrays["dy"], native + arrays["dy"]
    found = run(result, {v.name: arrays[v.name] for v in model.graph.input})["grad_input"]
    assert_gradients_close(found, native, exact, np.float32, terms=float(np.abs(arrays["dy"]).sum()))


NORMALIZED = """<ir_version: 10, opset_import: ["": 20]>
g (float[4,6,3] x, float[4,6,3] dy) => (float[4,6,3] dx) {
    axis = Constant<value_ints = [AXIS]>()  count = Constant<value_float = 6.0>()  one = Constant<value_float = 1.0>()
    eps = Constant<value_float = 0.00001>()  by = Constant<value_float = DIVISOR>()
    mean = ReduceMean(x, axis)  d = Sub(x, mean)  dd = Mul(d, d)  total = ReduceSum(dd, axis)  spread = Div(total, by)
    ROOT
    r = Div(one, std)  y = Mul(d, r)  dyy = Mul(dy, y)  of_dyy = ReduceSum(dyy, axis)  of_y = Mul(y, of_dyy)
    share = Div(of_y, by)  part = Identity(share)  of_dy = ReduceMean(dy, axis)  less = Sub(dy, of_dy)
    inside = Sub(less, part)  dx = Mul(r, inside)
}"""
USUAL = "shifted = Add(spread, eps)  std = Sqrt(shifted)"


@pytest.mark.parametrize(
    ("axis", "divisor", "root", "reason"),
    [
        (2, 3.0, USUAL, None),
        (2, 2.0, USUAL, "divided by one less than the number of elements"),
        (2, 3.0, "root = Sqrt(spread)  std = Add(root, eps)", "a number is added to its deviation"),
        (1, 6.0, USUAL, "other axes than the last ones"),
    ],
)
def test_explain_says_what_is_other_than_the_operators(
    axis: int, divisor: float, root: str, reason: str | None
) -> None:
    text = NORMALIZED.replace("AXIS", str(axis)).replace("DIVISOR", str(divisor)).replace("ROOT", root)
    if "root" in text:
        text = text.replace("part = Identity(share)", "of_root = Mul(r, root)  part = Div(share, of_root)")
    if axis == 1:
        # The channels would be one axis of three.
        text = text.replace("[4,6,3]", "[4,6,3,2]")
    model = onnx.parser.parse_model(text)
    result = fuse(model, policy="all")
    found = [region.reason for region in gradfuse.explain(model).regions if region.op == OP]
    if reason is None:
        assert [fusion.op for fusion in result.report.fusions] == [OP], result.report
    else:
        assert OP not in [fusion.op for fusion in result.report.fusions]
        assert any(reason in text for text in found), found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"y = Mul(d, rstd)": "result = Add(other, d)  y = Div(result, weight)"}, "results divided by the weight"),
        (
            {
                "mean_s = ReduceMean<keepdims = 1>(s, inner)": """zero = Constant<value_ints = [0]>()
                    sy = Mul(s, y)  first = Unsqueeze(s, zero)  second = Unsqueeze(sy, zero)
                    both = Concat<axis = 0>(first, second)  last = Constant<value_ints = [-1]>()
                    means = ReduceMean<keepdims = 1>(both, last)  k0 = Constant<value_int = 0>()
                    k1 = Constant<value_int = 1>()  mean_s = Gather(means, k0)  mean_sy = Gather(means, k1)""",
                "sy = Mul(s, y)\nmean_sy = ReduceMean<keepdims = 1>(sy, inner)": "",
            },
            "of one Concat",
        ),
    ],
)
def test_explain_says_how_it_was_written(changes: dict[str, str], reason: str) -> None:
    text = by_rule(3, 2, weighted=True, of_mean=True)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    found = [region.reason for region in gradfuse.explain(onnx_model(text, (4, 3, 7), 2)).regions if region.op == OP]
    assert any(reason in text for text in found), found


def test_halves_that_are_normalized_in_float32() -> None:
    """PyTorch's gradient where a module casts its input twice: each part of it is cast back by itself."""
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float16[6,8] x, float16[6,8] dy, float16[8] w) => (float16[6,8] dx) {
        axis = Constant<value_ints = [-1]>()  eps = Constant<value_float = 0.000001>()
        one = Constant<value_float = 1.0>()  two = Constant<value_float = 2.0>()  count = Constant<value_float = 8.0>()
        cube = Constant<value_float = 3.0>()  half = Constant<value_float = -0.5>()
        wide = Cast<to = 1>(x)  square = Pow(wide, two)  spread = ReduceMean(square, axis)  shifted = Add(spread, eps)
        std = Sqrt(shifted)  r = Reciprocal(std)
        dyw = Mul(dy, w)  g = Cast<to = 1>(dyw)  gx = Mul(g, wide)  gr = Mul(g, r)  of_gx = ReduceSum(gx, axis)
        r3 = Pow(r, cube)  halved = Mul(of_gx, half)  slope = Mul(halved, r3)  shape = Shape(x)
        slopes = Expand(slope, shape)  share = Div(slopes, count)  same = Pow(wide, one)  twice = Mul(same, two)
        through = Mul(share, twice)  a = Cast<to = 10>(through)  b = Cast<to = 10>(gr)  dx = Add(a, b)
    }"""
    result = fuse(onnx.parser.parse_model(text), policy="all")
    assert [fusion.op for fusion in result.report.fusions] == [OP], result.report
    numbers = np.random.default_rng(0)
    arrays = {name: numbers.standard_normal(size).astype(np.float16) for name, size in _HALVES.items()}
    exact = []
    for dtype in (torch.float64, torch.float16):
        x, dy, w = (torch.from_numpy(arrays[name]).to(dtype) for name in _HALVES)
        x.requires_grad_()
        normalized = torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
        exact.append(torch.autograd.grad(normalized, x, dy)[0].numpy())
    assert_gradients_close(run(result.model, arrays)["dx"], exact[1], exact[0], np.float16, terms=8)


_HALVES = {"x": (6, 8), "dy": (6, 8), "w": (8,)}
