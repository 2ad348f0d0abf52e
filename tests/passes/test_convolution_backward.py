"""The gradients of convolutions that were written as convolutions become one operator."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
import torch
from producers import run

import gradfuse
from gradfuse import fuse, optimizers
from gradfuse.passes.report import Report
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution of (items, groups * 2, *image) by a kernel, to `outputs` channels."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    items: int = 3
    outputs: int = 4
    cut: bool = True
    bias: bool = True
    changed: tuple[tuple[str, str], ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        reach = [self.dilation * (k - 1) + 1 for k in self.kernel]
        return tuple((n + 2 * self.padding - r) // self.stride + 1 for n, r in zip(self.image, reach, strict=True))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "g": (self.items, self.outputs, *self.places),
            "x": (self.items, 2 * self.groups, *self.image),
            "w": (self.outputs, 2, *self.kernel),
        }

    def model(self) -> onnx.ModelProto:
        rank = len(self.kernel)
        swap = [1, 0, *range(2, rank + 2)]
        pads = [self.padding] * 2 * rank
        window = f"strides = {[self.stride] * rank}, dilations = {[self.dilation] * rank}, group = {self.groups}"
        back = f"strides = {[self.dilation] * rank}, dilations = {[self.stride] * rank}, group = {self.groups}"
        missing = [
            n - ((p - 1) * self.stride - 2 * self.padding + self.dilation * (k - 1) + 1)
            for n, p, k in zip(self.image, self.places, self.kernel, strict=True)
        ]
        turned = f"turned = Transpose<perm = {swap}>(x)"
        if self.groups > 1:
            split = [self.items, self.groups, 2, *self.image]
            joined = [2, self.groups * self.items, *self.image]
            turned = (
                f"split = Constant<value_ints = {split}>() joined = Constant<value_ints = {joined}>() "
                f"apart = Reshape(x, split) across = Transpose<perm = {[2, 1, 0, *range(3, rank + 3)]}>(apart) "
                "turned = Reshape(across, joined)"
            )
        nodes = [
            f"y = Conv<{window}, pads = {pads}>(x, w)",
            f"grad_input = ConvTranspose<{window}, pads = {pads}, output_padding = {missing}>(g, w)",
            turned,
            f"by_output = Transpose<perm = {swap}>(g)",
            f"by_channel = Conv<{back}, pads = {pads}>(turned, by_output)",
            f"starts = Constant<value_ints = {[0] * rank}>() ends = Constant<value_ints = {list(self.kernel)}>()",
            f"places = Constant<value_ints = {[*range(2, rank + 2)]}>()",
            f"whole = Transpose<perm = {swap}>(by_channel)",
            "grad_weight = Slice(whole, starts, ends, places)" if self.cut else "grad_weight = Identity(whole)",
            f"axes = Constant<value_ints = {[0, *range(2, rank + 2)]}>()",
            "grad_bias = ReduceSum<keepdims = 0>(g, axes)",
        ]
        text = "\n".join(nodes)
        for old, new in self.changed:
            assert old in text, old
            text = text.replace(old, new)
        given = ", ".join(f"float{list(shape)} {name}" for name, shape in self.shapes.items())
        results = {"grad_input": self.shapes["x"], "grad_weight": self.shapes["w"], "y": self.shapes["g"]}
        if self.bias:
            results["grad_bias"] = (self.outputs,)
        outputs = ", ".join(f"float{list(shape)} {name}" for name, shape in results.items())
        return onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : 18]> f ({given}) => ({outputs}) {{ {text} }}'
        )

    def feeds(self) -> dict[str, Array]:
        numbers = np.random.default_rng(0)
        return {name: numbers.standard_normal(shape).astype(np.float32) for name, shape in self.shapes.items()}

    def of_torch(self, dtype: torch.dtype) -> dict[str, Array]:
        g, x, w = (torch.from_numpy(array).to(dtype) for array in self.feeds().values())
        rank = len(self.kernel)
        window = [[self.stride] * rank, [self.padding] * rank, [self.dilation] * rank]
        results = torch.ops.aten.convolution_backward(
            g, x, w, [self.outputs], *window, False, [0] * rank, self.groups, [True, True, True]
        )
        return dict(zip(("grad_input", "grad_weight", "grad_bias"), (r.numpy() for r in results), strict=True))


def fused(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Report]:
    result = fuse(model, policy="all", only=["ConvolutionBackward"])
    onnx.checker.check_model(result.model, full_check=True)
    return result.model, result.report


CONVOLUTIONS = {
    "one dimension": Convolution((9,), (3,), stride=2, padding=1),
    "stride": Convolution((8, 7), (3, 2), stride=2),
    "padding": Convolution((6, 6), (3, 3), padding=1),
    "dilation": Convolution((9, 10), (3, 3), dilation=2, padding=2, bias=False),
    "groups": Convolution((7, 6), (3, 3), groups=2, padding=1),
    "depthwise with stride": Convolution((8, 8), (3, 3), groups=4, stride=2, padding=1),
    "pointwise": Convolution((5, 5), (1, 1), cut=False),
    "three dimensions": Convolution((4, 5, 4), (2, 2, 2), stride=2, padding=1),
    "large": Convolution((40, 40), (3, 3), stride=2, padding=1, items=32, outputs=32),
    "large, with groups": Convolution((24, 24), (3, 3), stride=2, padding=1, groups=32, items=16, outputs=32),
    "large, with as many groups as items": Convolution((12, 12), (3, 3), padding=1, groups=32, items=32, outputs=32),
    "large, with as many items as places": Convolution(
        (24, 24), (3, 3), stride=2, padding=1, groups=32, items=12, outputs=32
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_torchs_decomposition(name: str) -> None:
    convolution = CONVOLUTIONS[name]
    model = convolution.model()
    result, report = fused(model)
    assert [f.op for f in report.fusions] == ["ConvolutionBackward"], report
    assert [node.op_type for node in result.graph.node if "Conv" in node.op_type] == ["Conv", "ConvolutionBackward"]
    exact, native = convolution.of_torch(torch.float64), convolution.of_torch(torch.float32)
    if name.startswith("large"):
        return  # Its proof runs it in smaller sizes; the results of others are compared.
    got = run(result, convolution.feeds())
    for output, value in exact.items():
        if output in got:
            terms = float(np.sqrt(np.prod(convolution.shapes["g"]))) * 4
            assert_gradients_close(got[output], native[output], value, np.float32, terms=terms)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("outputs", ["dx, dw, db", ", dw", "dx, dw", ", , db"])
def test_operators_of_onnxruntime_training(name: str, outputs: str) -> None:
    convolution = CONVOLUTIONS[name]
    rank = len(convolution.kernel)
    declared = ", ".join(f"float{list(shape)} {key}" for key, shape in convolution.shapes.items())
    shapes = {"dx": convolution.shapes["x"], "dw": convolution.shapes["w"], "db": (convolution.outputs,)}
    wanted = [key for key in outputs.replace(" ", "").split(",") if key]
    options = (
        f"strides = {[convolution.stride] * rank}, dilations = {[convolution.dilation] * rank}, "
        f"pads = {[convolution.padding] * 2 * rank}, group = {convolution.groups}, "
        f"kernel_shape = {list(convolution.kernel)}"
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        g ({declared}) => ({", ".join(f"float{list(shapes[key])} {key}_out" for key in wanted)}) {{
            {outputs} = com.microsoft.ConvGrad<{options}>(g, x, w)
            {" ".join(f"{key}_out = Identity({key})" for key in wanted)}
        }}"""
    )
    result, report = fused(model)
    assert [f.op for f in report.fusions] == ["ConvolutionBackward"], report
    if name.startswith("large"):
        return
    exact, native = (list(convolution.of_torch(dtype).values()) for dtype in (torch.float64, torch.float32))
    got = run(result, convolution.feeds())
    for key in wanted:
        index = ["dx", "dw", "db"].index(key)
        terms = float(np.sqrt(np.prod(convolution.shapes["g"]))) * 4
        assert_gradients_close(got[f"{key}_out"], native[index], exact[index], np.float32, terms=terms)


def test_an_automatic_padding_of_onnxruntime_training_stays() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        g (float[1, 2, 5] g, float[1, 2, 5] x, float[2, 2, 3] w) => (float[2, 2, 3] dw) {
            dx, dw, db = com.microsoft.ConvGrad<auto_pad = "SAME_UPPER", kernel_shape = [3]>(g, x, w)
        }"""
    )
    _, report = fused(model)
    assert not report.fusions and [miss.reason for miss in report.near_misses] == ["it has an automatic padding"]


PLAIN = Convolution((7, 7), (3, 3), stride=2, padding=1)
ALMOST = {
    "other pads": [("pads = [1, 1, 1, 1]>(turned", "pads = [0, 0, 2, 2]>(turned")],
    "a cut at the beginning": [
        ("starts = Constant<value_ints = [0, 0]>", "starts = Constant<value_ints = [1, 1]>"),
        ("ends = Constant<value_ints = [3, 3]>", "ends = Constant<value_ints = [4, 4]>"),
    ],
    "an image that was not turned": [("Transpose<perm = [1, 0, 2, 3]>(x)", "Transpose<perm = [1, 0, 3, 2]>(x)")],
    "places that were not turned": [("Transpose<perm = [1, 0, 2, 3]>(g)", "Transpose<perm = [1, 0, 3, 2]>(g)")],
}


@pytest.mark.parametrize("composed", [True, False])
def test_channels_that_are_last(composed: bool) -> None:
    """Images and weights as TensorFlow has them, with transpositions apart, or one for all that is to be swapped."""
    case = Convolution((6, 5), (3, 2))
    shapes = {"g": (3, *case.places, 4), "x": (3, 6, 5, 2), "w": (3, 2, 2, 4)}
    image, gradient = ("x", "g") if composed else ("image", "places")
    perm = [3, 0, 1, 2] if composed else [1, 0, 2, 3]
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]>
        f ({", ".join(f"float{list(shape)} {name}" for name, shape in shapes.items())})
            => (float[3,4,4,4] y, float[3,6,5,2] grad_input, float[3,2,2,4] grad_weight) {{
            image = Transpose<perm = [0,3,1,2]>(x)  kernel = Transpose<perm = [3,2,0,1]>(w)
            places = Transpose<perm = [0,3,1,2]>(g)  y_first = Conv(image, kernel)
            y = Transpose<perm = [0,2,3,1]>(y_first)  back = ConvTranspose(places, kernel)
            grad_input = Transpose<perm = [0,2,3,1]>(back)
            left = Transpose<perm = {perm}>({image})  right = Transpose<perm = {perm}>({gradient})
            by_channel = Conv(left, right)  grad_weight = Transpose<perm = [2,3,0,1]>(by_channel)
        }}""")
    result, report = fused(model)
    assert [fusion.op for fusion in report.fusions] == ["ConvolutionBackward"], report
    first = {"g": (0, 2, 3, 1), "x": (0, 2, 3, 1), "w": (2, 3, 1, 0)}
    feeds = {name: np.ascontiguousarray(array.transpose(first[name])) for name, array in case.feeds().items()}
    got = run(result, feeds)
    exact, native = case.of_torch(torch.float64), case.of_torch(torch.float32)
    for name, own in (("grad_input", "x"), ("grad_weight", "w")):
        wanted, single = (one[name].transpose(first[own]) for one in (exact, native))
        assert_gradients_close(got[name], single, wanted, np.float32, terms=3 * 4 * 4)


def test_a_result_that_is_turned_otherwise_is_turned_from_the_gradient() -> None:
    turned = ("whole = Transpose<perm = [1, 0, 2, 3]>", "whole = Transpose<perm = [1, 0, 3, 2]>")
    convolution = dataclasses.replace(PLAIN, image=(7, 7), changed=(turned,))
    model = convolution.model()
    result, report = fused(model)
    assert [fusion.op for fusion in report.fusions] == ["ConvolutionBackward"], report
    feeds = convolution.feeds()
    got, wanted = run(result, feeds)["grad_weight"], run(model, feeds)["grad_weight"]
    exact = convolution.of_torch(torch.float64)["grad_weight"].swapaxes(2, 3)
    assert_gradients_close(got, wanted, exact, np.float32, terms=float(wanted.size))


@pytest.mark.parametrize("name", ALMOST)
def test_products_that_are_almost_a_gradient_stay(name: str) -> None:
    convolution = dataclasses.replace(PLAIN, image=(7, 7), changed=tuple(ALMOST[name]))
    if name.startswith("a cut"):
        convolution = dataclasses.replace(convolution, image=(8, 8))
    model = convolution.model()
    result, report = fused(model)
    assert not any(f.op == "ConvolutionBackward" for f in report.fusions)
    assert [node.op_type for node in result.graph.node] == [node.op_type for node in model.graph.node]


def test_a_forward_with_another_stride_lends_no_weight() -> None:
    changed = (
        ("y = Conv<strides = [2, 2], dilations = [1, 1]", "y = Conv<strides = [2, 2], dilations = [2, 2]"),
        ("grad_input = ConvTranspose<strides = [2, 2]", "grad_input = ConvTranspose<strides = [1, 1]"),
    )
    model = dataclasses.replace(PLAIN, changed=changed).model()
    del model.graph.output[2:]
    del model.graph.output[0]
    _, report = fused(model)
    assert not report.fusions
    assert any("no convolution reads a weight of its shape" in miss.reason for miss in report.near_misses)


@pytest.mark.parametrize("batch", ["N", 6])
def test_steps_that_were_built_without_fusing(batch: str | int) -> None:
    shapes = {"w": (4, 3, 3, 3), "v": (4, 2, 3, 3), "a": (4, 3)}
    given = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> f (float[{batch},3,7,7] x) => (float[{batch},3] y) <{given}> {{'
        "c = Conv<pads = [1, 1, 1, 1]>(x, w) r = Relu(c) d = Conv<strides = [2, 2], group = 2>(r, v) "
        "g = GlobalAveragePool(d) f = Flatten(g) y = MatMul(f, a) }"
    )
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = numbers.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    plain = gradfuse.build_training_step(model, "cross_entropy", optimizer=optimizers.SGD(lr=0.1), fuse=False)
    result, report = fused(plain.model)
    assert any(f.op == "ConvolutionBackward" for f in report.fusions), report
    batch_of: dict[str, Array] = {plain.input_names[0]: numbers.standard_normal((6, 3, 7, 7)).astype(np.float32)}
    batch_of[plain.target_names[0]] = numbers.integers(0, 3, 6)
    feeds = {**plain.parameters, **plain.hyperparameters, **batch_of}
    wanted, got = run(plain.model, feeds), run(result, feeds)
    for name, value in wanted.items():
        assert_gradients_close(got[name], value, value.astype(np.float64), value.dtype, terms=16.0)


def test_places_of_unknown_rank_are_left_alone() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        f (float[N,4,T] x) => (float[N,T,4] y)
        <int64[1] none = {0}, int64[1] one = {1}, int64[1] all = {4}, int64[1] axis = {2}> {
            c = ConvTranspose<pads = [1, 1]>(x, w)
            t = Transpose<perm = [0, 2, 1]>(c)
            a = Slice(t, one, all, axis)
            b = Slice(t, none, one, axis)
            y = Concat<axis = 2>(a, b)
        }
    """)
    numbers = np.random.default_rng(0)
    w = numbers.standard_normal((4, 4, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    x, y = (numbers.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 5), (2, 5, 4)))
    session = gradfuse.TrainingSession(gradfuse.build_training_step(model, "mse"))
    session.step(x, y)

    def gradient(dtype: torch.dtype) -> Array:
        weight = torch.tensor(w, dtype=dtype, requires_grad=True)
        c = torch.nn.functional.conv_transpose1d(torch.tensor(x).to(dtype), weight, padding=1).mT
        loss = torch.nn.functional.mse_loss(torch.cat([c[..., 1:], c[..., :1]], 2), torch.tensor(y).to(dtype))
        (found,) = torch.autograd.grad(loss, weight)
        return np.asarray(found)

    assert_gradients_close(session.gradients["w"], gradient(torch.float32), gradient(torch.float64), np.float32)


AS_PRODUCTS = {
    "over all pixels": """
        rows = Constant<value_ints = [-1, 2]>()  places = Constant<value_ints = [-1, 4]>()
        x_last = Transpose<perm = [0, 2, 3, 1]>(x)  x_rows = Reshape(x_last, rows)
        g_last = Transpose<perm = [0, 2, 3, 1]>(g)  g_rows = Reshape(g_last, places)
        turned = Transpose<perm = [1, 0]>(g_rows)  dw = MatMul(turned, x_rows)""",
    "which an index unfolds": """
        flat = Constant<value_ints = [3, 2, 9]>()  x_flat = Reshape(x, flat)
        places = Constant<value = int64[2, 4] {0, 1, 3, 4, 1, 2, 4, 5}>()  taps = Gather<axis = 2>(x_flat, places)
        columns = Constant<value_ints = [3, 4, 4]>()  windows = Reshape(taps, columns)  y = MatMul(w, windows)
        of_places = Constant<value_ints = [3, 4, 4]>()  first = Constant<value_ints = [0, 0]>()
        fours = Constant<value_ints = [2, 2]>()  spatial = Constant<value_ints = [2, 3]>()
        part = Slice(g, first, fours, spatial)  g_flat = Reshape(part, of_places)
        turned = Transpose<perm = [0, 2, 1]>(windows)  dw = MatMul(g_flat, turned)""",
    "for each image and channel": """
        one = Constant<value_ints = [1, 6, 3, 3]>()  x_one = Reshape(x, one)  first = Constant<value_ints = [0]>()
        two = Constant<value_ints = [2]>()  axes = Constant<value_ints = [1]>()  part = Slice(g, first, two, axes)
        each = Constant<value_ints = [6, 1, 3, 3]>()  g_each = Reshape(part, each)
        all = Conv<group = 6, pads = [1, 1, 1, 1]>(x_one, g_each)  split = Constant<value_ints = [3, 2, 3, 3]>()
        apart = Reshape(all, split)  dw = ReduceSum<keepdims = 0>(apart, first)""",
}


@pytest.mark.parametrize("reason", AS_PRODUCTS)
def test_explain_names_gradients_that_are_products_of_matrices(reason: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        backward (float[3,2,3,3] x, float[3,4,3,3] g, float[4,4] w) => (float dw) {{ {AS_PRODUCTS[reason]} }}"""
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    regions = gradfuse.explain(model).regions
    found = [region.reason for region in regions if region.op == "ConvolutionBackward"]
    assert len(found) == 1 and reason in found[0], regions
