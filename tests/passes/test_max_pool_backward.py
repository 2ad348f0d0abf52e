"""Gradients of maximum pooling, as several producers write them, become one operator."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from producers import run
from torch import nn

import gradfuse
from gradfuse import fuse
from gradfuse.passes.report import Report

pytestmark = pytest.mark.usefixtures("inference_in_process")

Array = npt.NDArray[Any]


SUMS = """
    one = Constant<value_ints = [1]>()  flat = Constant<value_ints = [-1]>()
    size = Size(x)  length = Reshape(size, one)  zeros = ConstantOfShape(length)
    places = Reshape(indices, flat)  line = Reshape(g, flat)
    sums = ScatterElements<axis = 0, reduction = "add">(zeros, places, line)"""
SUMS_OF_PLANES = """
    of_windows = Constant<value_ints = WINDOWS>()  of_planes = Constant<value_ints = PLANES>()
    zeros = ConstantOfShape(of_planes)  places = Reshape(local, of_windows)  line = Reshape(g, of_windows)
    sums = ScatterElements<axis = 1, reduction = "add">(zeros, places, line)"""


@dataclasses.dataclass(frozen=True)
class Pooling:
    """Pooling of (items, 4, *image); `named`: with symbols for the items, and for the image."""

    image: tuple[int, ...]
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    ceil_mode: bool = False
    items: int = 3
    named: bool = False
    changed: tuple[tuple[str, str], ...] = ()

    def by_torch(self, x: torch.Tensor) -> torch.Tensor:
        pool: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(self.image)]
        result: torch.Tensor = pool(x, self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode)
        return result

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = (self.items, 4, *self.image)
        return shape, tuple(self.by_torch(torch.zeros(shape)).shape)

    def model(self) -> onnx.ModelProto:
        rank = len(self.image)
        declared = [", ".join(("N" if self.named else str(n), *map(str, dims))) for n, *dims in self.shapes]
        window = (
            f"kernel_shape = {[self.kernel] * rank}, strides = {[self.stride] * rank}, "
            f"pads = {[self.padding] * 2 * rank}, dilations = {[self.dilation] * rank}, "
            f"ceil_mode = {int(self.ceil_mode)}"
        )
        text = f"""
            <ir_version: 10, opset_import: ["": 20]>
            pooling (float[{declared[0]}] x, float[{declared[1]}] g)
                => (float[{declared[1]}] y, float[{declared[0]}] dx) {{
                y, indices = MaxPool<{window}>(x)
                {SUMS}
                shape = Shape(x)
                dx = Reshape<allowzero = 1>(sums, shape)
            }}
        """
        for old, new in self.changed:
            assert old in text
            text = text.replace(old, new)
        return onnx.parser.parse_model(text)

    def feeds(self) -> dict[str, Array]:
        """With many ties: the first of equal maxima gets the gradient."""
        numbers = np.random.default_rng(0)
        x, g = self.shapes
        return {
            "x": numbers.integers(-2, 3, x).astype(np.float32),
            "g": numbers.integers(-9, 10, g).astype(np.float32),
        }


def fused(model: onnx.ModelProto, policy: Any = "profitable") -> tuple[onnx.ModelProto, Report]:
    result = fuse(model, policy=policy, only=["MaxPoolBackward"])
    onnx.checker.check_model(result.model, full_check=True)
    return result.model, result.report


POOLINGS = {
    "one dimension": Pooling((9,), 3, stride=2, padding=1),
    "overlapping": Pooling((8, 7), 3, stride=2, padding=1),
    "each element": Pooling((8, 7), 3, padding=1),
    "each pair": Pooling((6, 7), 2),
    "apart": Pooling((9, 8), 2, stride=3),
    "dilation": Pooling((9, 10), 2, stride=2, padding=1, dilation=2),
    "three dimensions": Pooling((4, 5, 6), 2, stride=2),
    "ceil_mode": Pooling((7, 8), 3, stride=2, ceil_mode=True),
    "named items": Pooling((8, 7), 3, stride=2, padding=1, named=True),
    "large": Pooling((112, 112), 3, stride=2, padding=1, items=32),
    "large, named items": Pooling((112, 56), 2, stride=2, named=True),
}


BY_ONE_HOT = """
    best = ArgMax<axis = 4, keepdims = 0>(windows)  four = Constant<value_int = 4>()
    pair = Constant<value_floats = [0.0, 1.0]>()  hot = OneHot(best, four, pair)  last = Constant<value_ints = [-1]>()
    column = Unsqueeze(g, last)  each = Mul(hot, column)"""
BY_SCATTER = """
    best = ArgMax<axis = 4>(windows)  whole = Shape(windows)  zeros = ConstantOfShape(whole)
    last = Constant<value_ints = [-1]>()  column = Unsqueeze(g, last)
    each = ScatterElements<axis = 4>(zeros, best, column)"""


def by_argmax(gradient: str, *changes: tuple[str, str]) -> onnx.ModelProto:
    """Pooling of windows of 2 by 2 that are a dimension of their own."""
    text = f"""
        <ir_version: 10, opset_import: ["": 20]>
        pooling (float[3, 4, 6, 4] x, float[3, 4, 3, 2] g) => (float[3, 4, 3, 2] y, float[3, 4, 6, 4] dx) {{
            apart = Constant<value_ints = [3, 4, 3, 2, 2, 2]>()  one_each = Constant<value_ints = [3, 4, 3, 2, 4]>()
            shape = Constant<value_ints = [3, 4, 6, 4]>()  axis = Constant<value_ints = [4]>()
            parts = Reshape(x, apart)  turned = Transpose<perm = [0, 1, 2, 4, 3, 5]>(parts)
            windows = Reshape(turned, one_each)  y = ReduceMax<keepdims = 0>(windows, axis)
            {gradient}
            parts_of_dx = Reshape(each, apart)  back = Transpose<perm = [0, 1, 2, 4, 3, 5]>(parts_of_dx)
            dx = Reshape(back, shape)
        }}
    """
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return onnx.parser.parse_model(text)


BY_WHERE = """
    best = ArgMax<axis = 4>(windows)  places = Constant<value_ints = [0, 1, 2, 3]>()  hit = Equal(best, places)
    zero = Constant<value_float = 0.0>()  last = Constant<value_ints = [-1]>()  column = Unsqueeze(g, last)
    each = Where(hit, column, zero)"""


@pytest.mark.parametrize("gradient", [BY_ONE_HOT, BY_SCATTER, BY_WHERE])
def test_gradients_at_the_argmax_of_windows(gradient: str) -> None:
    model, report = fused(by_argmax(gradient), policy="all")
    assert [fusion.rule for fusion in report.fusions] == ["max-pool-by-argmax"], report
    pooling = Pooling((6, 4), 2, stride=2)
    feeds = pooling.feeds()
    x = torch.from_numpy(feeds["x"]).requires_grad_()
    (wanted,) = torch.autograd.grad(pooling.by_torch(x), x, torch.from_numpy(feeds["g"]))
    np.testing.assert_array_equal(run(model, feeds)["dx"], wanted.numpy())


@pytest.mark.parametrize(
    "change",
    [
        ("ArgMax<axis = 4", "ArgMin<axis = 4"),
        ("ArgMax<axis = 4", "ArgMax<select_last_index = 1, axis = 4"),
        (
            "turned = Transpose<perm = [0, 1, 2, 4, 3, 5]>(parts)",
            "turned = Transpose<perm = [0, 1, 2, 4, 5, 3]>(parts)",
        ),
    ],
)
def test_other_choices_from_windows_stay(change: tuple[str, str]) -> None:
    _, report = fused(by_argmax(BY_ONE_HOT, change), policy="all")
    assert not report.fusions and not any(miss.bug for miss in report.near_misses), report


@pytest.mark.parametrize("name", POOLINGS)
def test_sums_at_the_indices_of_maxima(name: str) -> None:
    pooling = POOLINGS[name]
    result, report = fused(pooling.model())
    assert [f.op for f in report.fusions] == ["MaxPoolBackward"], report
    # Nothing asks for the indices any more.
    assert [len(node.output) for node in result.graph.node if node.op_type == "MaxPool"] == [1]
    feeds = pooling.feeds()
    x = torch.from_numpy(feeds["x"]).requires_grad_()
    (expected,) = torch.autograd.grad(pooling.by_torch(x), x, torch.from_numpy(feeds["g"]))
    # Whole numbers, whose sums are exact.
    np.testing.assert_array_equal(run(result, feeds)["dx"], expected.numpy())


LOCAL = {
    "as PyTorch's exporter": """
        at = Constant<value_ints = BEGIN>()  after = Constant<value_ints = END>()
        spatial = Constant<value_ints = SPATIAL>()
        _, singles = MaxPool<kernel_shape = END>(x)  starts = Slice(singles, at, after, spatial)
        local = Sub(indices, starts)""",
    "remainders": "plane = Constant<value_int = SIZE>()  local = Mod(indices, plane)",
}
"""What makes indices count from the start of each plane."""


def of_planes(pooling: Pooling, way: str, size: int) -> onnx.ModelProto:
    (items, channels, *image), windows = pooling.shapes
    written = {
        "BEGIN": [0] * len(image),
        "END": [1] * len(image),
        "SPATIAL": [*range(2, 2 + len(image))],
        "SIZE": size,
        "WINDOWS": [items * channels, math.prod(windows[2:])],
        "PLANES": [items * channels, math.prod(image)],
    }
    text = LOCAL[way] + SUMS_OF_PLANES
    for key, value in written.items():
        text = text.replace(key, str(value))
    return dataclasses.replace(pooling, changed=((SUMS, text),)).model()


@pytest.mark.parametrize("name", ["overlapping", "dilation", "one dimension", "large"])
@pytest.mark.parametrize("way", LOCAL)
def test_sums_at_indices_of_each_plane(way: str, name: str) -> None:
    pooling = POOLINGS[name]
    result, report = fused(of_planes(pooling, way, math.prod(pooling.image)), "all")
    assert [f.op for f in report.fusions] == ["MaxPoolBackward"], report
    assert [len(node.output) for node in result.graph.node if node.op_type == "MaxPool"] == [1]
    feeds = pooling.feeds()
    x = torch.from_numpy(feeds["x"]).requires_grad_()
    (expected,) = torch.autograd.grad(pooling.by_torch(x), x, torch.from_numpy(feeds["g"]))
    np.testing.assert_array_equal(run(result, feeds)["dx"], expected.numpy())


def test_indices_of_other_planes_stay() -> None:
    """A remainder by half a plane is the index of another element."""
    pooling = POOLINGS["overlapping"]
    assert not fused(of_planes(pooling, "remainders", math.prod(pooling.image) // 2), "all")[1].fusions


APART = Pooling((6, 8), 2, stride=2)
OTHER_SUMS = {
    "rows of one index": (
        ("flat = C", "rows = Constant<value_ints = [-1, 1]>()  flat = C"),
        ("Reshape(indices, flat)", "Reshape(indices, rows)"),
        ("ScatterElements<axis = 0, ", "ScatterND<"),
    ),
    "put and not added": ((', reduction = "add"', ""),),
    "MaxUnpool": ((SUMS, "sums = MaxUnpool<kernel_shape = [2, 2], strides = [2, 2]>(g, indices)"),),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SUMS)
def test_sums_at_the_maxima_of_windows_that_do_not_overlap(name: str) -> None:
    pooling = dataclasses.replace(APART, changed=OTHER_SUMS[name])
    result, report = fused(pooling.model(), "all")
    assert [f.op for f in report.fusions] == ["MaxPoolBackward"], report
    feeds = pooling.feeds()
    x = torch.from_numpy(feeds["x"]).requires_grad_()
    (expected,) = torch.autograd.grad(pooling.by_torch(x), x, torch.from_numpy(feeds["g"]))
    np.testing.assert_array_equal(run(result, feeds)["dx"], expected.numpy())


@pytest.mark.parametrize(
    "maxima",
    [
        "by = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>() top = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)"
        " whole = Resize(top, , by)  mask = Equal(x, whole)",
        "split = Constant<value_ints = [3, 4, 3, 2, 4, 2]>()  parts = Reshape(x, split)"
        " ends = Constant<value_ints = [3, 5]>()  top = ReduceMax(parts, ends)  mask = Equal(parts, top)",
    ],
)
def test_explain_says_that_equal_maxima_all_get_the_gradient(maxima: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 20]>
        pooling (float[3, 4, 6, 8] x) => (bool[M, N, O, P] y) {{
            {maxima} shape = Shape(x) y = Reshape(mask, shape) }}"""
    regions = gradfuse.explain(onnx.parser.parse_model(text)).regions
    assert [(one.op, "every element that equals" in one.reason) for one in regions] == [("MaxPoolBackward", True)]


PLAIN = Pooling((7, 7), 3, stride=2, padding=1)
ALMOST = {
    "numbers that are no zeros": (("zeros = ConstantOfShape(length)", "zeros = Expand(one_float, length)"),),
    "a product instead of a sum": (('reduction = "add"', 'reduction = "mul"'),),
    "no reduction": ((', reduction = "add"', ""),),
    "columns first": (("ceil_mode = 0", "ceil_mode = 0, storage_order = 1"),),
    "indices that are moved": (
        (
            "places = Reshape(indices, flat)",
            "added = Mul(indices, one) more = Add(added, one) places = Reshape(more, flat)",
        ),
    ),
    "a gradient that was turned": (
        ("line = Reshape(g, flat)", "turned = Transpose<perm = [0, 1, 3, 2]>(g) line = Reshape(turned, flat)"),
    ),
}


@pytest.mark.parametrize("name", ALMOST)
def test_sums_that_are_almost_a_gradient(name: str) -> None:
    """They stay, or what takes their place gives the same."""
    changed: tuple[tuple[str, str], ...] = ALMOST[name]
    if "one_float" in str(changed):
        changed = (*changed, ("one = Constant", "one_float = Constant<value_float = 1.0>() one = Constant"))
    pooling = dataclasses.replace(PLAIN, changed=changed)
    model = pooling.model()
    result, report = fused(model, "all")
    if name != "a gradient that was turned":
        assert not report.fusions, report
    feeds = pooling.feeds()
    if name != "indices that are moved":  # The last index would be behind the end.
        np.testing.assert_array_equal(run(result, feeds)["dx"], run(model, feeds)["dx"])


def of_training(window: str, indices: str = "indices") -> onnx.ModelProto:
    """A pooling, and MaxPoolGrad of onnxruntime-training with a window of its own."""
    text = f"""
        <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[N, 2, 6, 6] x, float[N, 2, 3, 3] g, int64[N, 2, 3, 3] given) => (float[N, 2, 3, 3] y, float dx) {{
            y, indices = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)
            dx = MaxPoolGrad<{window}>(g, {indices})
        }}
    """
    model = onnx.parser.parse_model(text)
    model.graph.output[1].type.CopyFrom(model.graph.input[0].type)
    return model


def test_the_operator_of_onnxruntime_training() -> None:
    model = of_training('kernel_shape = [2, 2], strides = [2, 2], storage_order = 0, auto_pad = "NOTSET"')
    result, report = fused(model, "all")
    assert [f.op for f in report.fusions] == ["MaxPoolBackward"], report
    del result.graph.input[2]
    numbers = np.random.default_rng(0)
    feeds = {
        "x": numbers.integers(-2, 3, (3, 2, 6, 6)).astype(np.float32),
        "g": numbers.integers(-9, 10, (3, 2, 3, 3)).astype(np.float32),
    }
    x = torch.from_numpy(feeds["x"]).requires_grad_()
    (expected,) = torch.autograd.grad(F.max_pool2d(x, 2), x, torch.from_numpy(feeds["g"]))
    np.testing.assert_array_equal(run(result, feeds)["dx"], expected.numpy())


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("twin", ["unread", "read"])
def test_several_gradients_at_the_indices_of_one_pooling(twin: str, declared: bool) -> None:
    model = of_training("kernel_shape = [2, 2], strides = [2, 2]")
    graph = model.graph
    del graph.input[2]
    graph.node.append(helper.make_node("MaxPoolGrad", ["g", "indices"], ["twin"], kernel_shape=[2, 2], strides=[2, 2]))
    graph.node.append(helper.make_node("Neg", ["twin"], ["far"]))
    if twin == "read":
        graph.node[2].input[0] = "y"
        graph.output.append(helper.make_tensor_value_info("far", onnx.TensorProto.FLOAT, None))
    if not declared:
        graph.output[1].type.tensor_type.ClearField("shape")
    result, report = fused(model, "all")
    assert [f.op for f in report.fusions].count("MaxPoolBackward") >= 1 + (twin == "read"), report
    assert [len(node.output) for node in result.graph.node if node.op_type == "MaxPool"] == [1]
    numbers = np.random.default_rng(0)
    feeds = {
        "x": numbers.integers(-2, 3, (3, 2, 6, 6)).astype(np.float32),
        "g": numbers.integers(-9, 10, (3, 2, 3, 3)).astype(np.float32),
    }
    x = torch.from_numpy(feeds["x"]).requires_grad_()
    y = F.max_pool2d(x, 2)
    got = run(result, feeds)
    for name, seed in {"dx": torch.from_numpy(feeds["g"]), "far": -y.detach()}.items():
        if name in got:
            (expected,) = torch.autograd.grad(y, x, seed, retain_graph=True)
            np.testing.assert_array_equal(got[name], expected.numpy())


@pytest.mark.parametrize(
    ("window", "indices", "reason"),
    [
        ("kernel_shape = [3, 3], strides = [2, 2]", "indices", "its window is another one than that of the pooling"),
        ("kernel_shape = [2, 2], strides = [2, 2]", "given", "its indices are not those of a MaxPool of the graph"),
    ],
)
def test_the_operator_of_onnxruntime_training_for_another_pooling(window: str, indices: str, reason: str) -> None:
    model = of_training(window, indices)
    assert not fuse(model, policy="all").report.fusions
    assert reason in " ".join(region.reason for region in gradfuse.explain(model).regions)


def test_indices_that_something_else_reads_stay() -> None:
    model = PLAIN.model()
    model.graph.output.append(onnx.helper.make_tensor_value_info("indices", onnx.TensorProto.INT64, PLAIN.shapes[1]))
    _, report = fused(model, "all")
    assert not report.fusions
    assert [miss.reason for miss in report.near_misses] == ["something else reads the indices of the maxima"]


def test_a_window_that_begins_behind_the_image_stays() -> None:
    """onnx gives (4, 4) windows by 1 of every 3 pixels a fifth one, where torch has four."""
    text = """
        <ir_version: 10, opset_import: ["": 21]> g (float[1, 1, 4] x, float[1, 1, 3] g) => (float[1, 1, 4] dx) {
            y, indices = MaxPool<kernel_shape = [1], strides = [3], pads = [0, 0], ceil_mode = 1>(x)
            one = Constant<value_ints = [1]>()  flat = Constant<value_ints = [-1]>()
            size = Size(x)  length = Reshape(size, one)  zeros = ConstantOfShape(length)
            places = Reshape(indices, flat)  line = Reshape(g, flat)
            sums = ScatterElements<axis = 0, reduction = "add">(zeros, places, line)
            shape = Shape(x)  dx = Reshape(sums, shape)
        }
    """
    assert not fused(onnx.parser.parse_model(text), "all")[1].fusions


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3), nn.Linear(36, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(F.max_pool2d(self.first(x).relu(), 2).flatten(1))
        return result


@pytest.mark.parametrize("named", [True, False])
def test_steps_that_were_exported_without_fusing(named: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 1, 8, 8), torch.randint(0, 3, (5,))
    shapes = ({0: "N"}, {0: "N"}) if named else None
    step = gradfuse.export_training_step(Net(), F.cross_entropy, (x, y), fuse=False, dynamic_shapes=shapes)
    result, report = fused(step.model)
    assert [f.op for f in report.fusions] == ["MaxPoolBackward"]
    feeds = {**step.parameters, step.input_names[0]: x.numpy(), step.target_names[0]: y.numpy()}
    plain, found = run(step.model, feeds), run(result, feeds)
    for name, array in plain.items():
        np.testing.assert_array_equal(found[name], array)
