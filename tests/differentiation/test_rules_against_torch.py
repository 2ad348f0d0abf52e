"""Gradient rules in the corners of operators, against torch.autograd in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from autograd import model_of, numbers, require_torchs, shaped
from node_tests import run
from torch import Tensor

from gradfuse import ModelError, TrainingSession, build_training_step, differentiate
from gradfuse.testing import assert_gradients_close

Array = npt.NDArray[Any]
ByTorch = Callable[..., Tensor]

pytestmark = pytest.mark.usefixtures("inference_in_process")


@pytest.mark.parametrize("op, by_torch", [("Mul", torch.mul), ("Sub", torch.sub), ("Div", torch.div)])
@pytest.mark.parametrize(
    "a, b",
    [((3, 4), (3, 4)), ((3, 1), (1, 4)), ((1, 4), (3, 1)), ((1, 1), (3, 4)), ((3, 4), (1, 1)), ((1, 4), (3, 4))],
)
def test_sizes_that_are_1_at_run_time_are_summed_over(op: str, by_torch: Any, a: Any, b: Any) -> None:
    model = model_of("float[K, L] a, float[M, N] b", f"y = {op}(a, b)", output="float[O, P] y")
    require_torchs(model, shaped(a, b), lambda a, b: by_torch(a, b), ["a", "b"])


@pytest.mark.parametrize("a, b", [((2, 3), (3,)), ((3,), (2, 3)), ((2, 3), (1,)), ((2, 3), ()), ((), (2, 3))])
def test_ranks_that_differ_are_summed_over(a: Any, b: Any) -> None:
    def declared(name: str, shape: tuple[int, ...]) -> str:
        return f"float[{', '.join(f'{name}{k}' for k in range(len(shape)))}] {name}" if shape else f"float {name}"

    model = model_of(f"{declared('a', a)}, {declared('b', b)}", "y = Mul(a, b)")
    require_torchs(model, shaped(a, b), lambda a, b: a * b, ["a", "b"])


def test_relus_let_gradients_of_nan_through() -> None:
    x = torch.tensor([torch.nan, -1.0, 0.0, 2.0], requires_grad=True)
    seed = np.array([1, 2, 3, 4], np.float32)
    gradient = differentiate(model_of("float[4] x", "y = Relu(x)"), ["x"], seeds={"y": "seed"})
    found = run(gradient, {"x": x.detach().numpy(), "seed": seed}, by_onnx=False)
    (expected,) = torch.autograd.grad(torch.relu(x), x, torch.from_numpy(seed))
    np.testing.assert_array_equal(found["x.grad"], expected.numpy())


@pytest.mark.parametrize(
    "a, b",
    [
        ((5, 2, 3), (5, 3, 4)),
        ((1, 2, 3), (5, 3, 4)),
        ((5, 2, 3), (1, 3, 4)),
        ((2, 3), (5, 3, 4)),
        ((5, 2, 3), (3, 4)),
        ((3,), (5, 3, 4)),
        ((5, 2, 3), (3,)),
        ((3,), (3,)),
        ((2, 3), (3,)),
        ((3,), (3, 4)),
        ((6, 1, 2, 3), (5, 3, 4)),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_matmul_of_all_ranks(a: Any, b: Any, named: bool) -> None:
    dims = [", ".join(f"{n}{k}" if named else str(size) for k, size in enumerate(s)) for n, s in (("a", a), ("b", b))]
    model = model_of(f"float[{dims[0]}] a, float[{dims[1]}] b", "y = MatMul(a, b)")
    require_torchs(model, shaped(a, b), lambda a, b: torch.matmul(a, b), ["a", "b"])


@pytest.mark.parametrize("trans_a, trans_b", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("c", [(2, 4), (4,), (1, 4), (2, 1), (1,), (), None])
def test_gemm(trans_a: int, trans_b: int, c: Any) -> None:
    a, b = ((3, 2) if trans_a else (2, 3)), ((4, 3) if trans_b else (3, 4))
    declared = "" if c is None else f", float[{', '.join(f'c{k}' for k in range(len(c)))}] c" if c else ", float c"
    options = f"<alpha: float = 0.5, beta: float = 1.5, transA: int = {trans_a}, transB: int = {trans_b}>"
    model = model_of(
        f"float[a0, a1] a, float[b0, b1] b{declared}", f"y = Gemm {options} (a, b{'' if c is None else ', c'})"
    )
    feeds = shaped(a, b) if c is None else shaped(a, b, c)

    def by_torch(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        product = 0.5 * (a.T if trans_a else a) @ (b.T if trans_b else b)
        return product if c is None else product + 1.5 * c

    require_torchs(model, feeds, by_torch, list(feeds))


def test_a_value_that_is_used_many_times_gets_the_sum() -> None:
    model = model_of("float[3, 3] a", "b = MatMul(a, a) c = Transpose <perm = [1, 0]> (a) d = Add(b, c) y = Mul(d, d)")
    require_torchs(model, shaped((3, 3)), lambda a: (a @ a + a.T) ** 2, ["a"])


@pytest.mark.parametrize(
    "slices",
    [
        (slice(1, 3), slice(None)),
        (slice(None, None, 2), slice(None)),
        (slice(None, None, -1), slice(None)),
        (slice(4, 0, -2), slice(-3, -1)),
        (slice(-100, 100), slice(1, -1, 3)),
        (slice(3, 1), slice(None)),
        (slice(-2, None), slice(5, None, -3)),
    ],
)
@pytest.mark.parametrize("constant", [True, False])
def test_slices(slices: tuple[slice, ...], constant: bool) -> None:
    shape, end = (5, 6), np.iinfo(np.int64).max
    steps = [s.step or 1 for s in slices]
    starts = [
        s.start if s.start is not None else (0 if step > 0 else end) for s, step in zip(slices, steps, strict=True)
    ]
    ends = [
        s.stop if s.stop is not None else (end if step > 0 else -end) for s, step in zip(slices, steps, strict=True)
    ]
    values = {"starts": starts, "ends": ends, "axes": [0, -1], "steps": steps}
    arrays = {name: np.array(v, np.int64) for name, v in values.items()}
    model = model_of(
        "float[N, M] a" + ("" if constant else "".join(f", int64[2] {name}" for name in arrays)),
        "y = Slice(a, starts, ends, axes, steps)",
        output="float[O, P] y",
    )
    feeds = shaped(shape)
    if constant:
        model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in arrays.items())
    else:
        feeds |= arrays
    positions = torch.tensor(np.arange(30).reshape(shape)[slices].copy())
    require_torchs(model, feeds, lambda a, **_: a.flatten()[positions], ["a"])


def test_a_slice_without_axes_and_steps() -> None:
    model = model_of("float[N, 6] a, int64[1] s, int64[1] e", "y = Slice(a, s, e)", output="float[O, 6] y")
    feeds = {**shaped((5, 6)), "s": np.array([-4]), "e": np.array([4])}
    require_torchs(model, feeds, lambda a, **_: a[-4:4], ["a"])


CONVOLUTIONS: Sequence[tuple[int, tuple[int, ...], dict[str, Any]]] = [
    (1, (3, 4, 9), {"strides": [2], "pads": [2, 0]}),
    (1, (3, 4, 8, 9), {"strides": [2, 3], "dilations": [2, 1], "pads": [1, 0, 2, 1]}),
    (2, (3, 4, 7, 8), {"strides": [3, 2], "pads": [0, 1, 1, 0]}),
    (4, (2, 4, 6, 6), {"dilations": [2, 2]}),
    (2, (2, 4, 5, 6, 7), {"strides": [1, 2, 3], "pads": [1, 0, 1, 0, 2, 1]}),
    (1, (2, 4, 10, 3), {"strides": [4, 1]}),
]


@pytest.mark.parametrize("group, image, options", CONVOLUTIONS)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions(group: int, image: tuple[int, ...], options: dict[str, Any], dynamic: bool, bias: bool) -> None:
    axes = len(image) - 2
    weight = (4, image[1] // group, *[3, 2, 2][:axes])
    strides, dilations = options.get("strides", [1] * axes), options.get("dilations", [1] * axes)
    pads = options.get("pads", [0] * 2 * axes)
    dims = ", ".join(f"d{k}" if dynamic and k != 1 else str(size) for k, size in enumerate(image))
    model = model_of(
        f"float[{dims}] a, float[{', '.join(map(str, weight))}] b" + (", float[4] c" if bias else ""),
        f"y = Conv <{_attributes({**options, 'group': group})}> (a, b{', c' if bias else ''})",
    )
    feeds = shaped(image, weight, (4,)) if bias else shaped(image, weight)

    def by_torch(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        around = [p for k in reversed(range(axes)) for p in (pads[k], pads[k + axes])]
        return getattr(F, f"conv{axes}d")(F.pad(a, around), b, c, strides, 0, dilations, group)  # type: ignore[no-any-return]

    require_torchs(model, feeds, by_torch, list(feeds))


def _attributes(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_with_auto_pad(auto_pad: str, stride: int) -> None:
    model = model_of(
        "float[2, 3, 7, 8] a, float[4, 3, 3, 2] b",
        f'y = Conv <auto_pad = "{auto_pad}", strides = [{stride}, {stride}]> (a, b)',
    )

    def by_torch(a: Tensor, b: Tensor) -> Tensor:
        around = []
        for size, kernel in ((8, 2), (7, 3)):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0) if auto_pad != "VALID" else 0
            half = total // 2
            around += [half, total - half] if auto_pad == "SAME_UPPER" else [total - half, half]
        return F.conv2d(F.pad(a, around), b, stride=stride)

    require_torchs(model, shaped((2, 3, 7, 8), (4, 3, 3, 2)), by_torch, ["a", "b"])


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "AveragePool <": lambda x: F.avg_pool1d(x, 2, 4),
    "LpPool <p = 2,": lambda x: F.lp_pool1d(x, 2, 2, 4),
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("auto_pad, begin", [("SAME_UPPER", 1), ("SAME_LOWER", 0)])
def test_pools_with_auto_pad_and_a_stride_that_leaps_over_elements(pool: str, auto_pad: str, begin: int) -> None:
    """onnxruntime cuts off what no window reaches: two of eight elements, which is a padding of less than nothing."""
    body = f'y = {pool} kernel_shape = [2], strides = [4], auto_pad = "{auto_pad}"> (x)'
    model = model_of("float[2, 3, 8] x", body, opset=19, output="float[2, 3, 2] y")
    require_torchs(model, {"x": numbers(2, 3, 8)}, lambda x: POOLS[pool](x[..., begin : begin + 6]), ["x"])


@pytest.mark.parametrize("pool", POOLS)
def test_pools_with_auto_pad_and_dilations_are_refused(pool: str) -> None:
    body = f'y = {pool} kernel_shape = [2], dilations = [2], auto_pad = "SAME_UPPER"> (x)'
    with pytest.raises(ModelError, match="auto_pad is SAME_UPPER with dilations; expected pads"):
        differentiate(model_of("float[2, 3, 8] x", body, 19, "float[2, 3, n] y"), ["x"], seeds={"y": "v"})


@pytest.mark.parametrize(
    "group, options",
    [
        (1, {"strides": [2, 3], "pads": [1, 0, 0, 2]}),
        (2, {"strides": [3, 2], "output_padding": [2, 1], "pads": [1, 1, 1, 1]}),
        (2, {"strides": [2, 2], "dilations": [2, 1], "output_padding": [1, 0]}),
        (1, {"dilations": [2, 3], "pads": [0, 1, 2, 1]}),
    ],
)
@pytest.mark.parametrize("dynamic", [True, False])
def test_transposed_convolutions(group: int, options: dict[str, Any], dynamic: bool) -> None:
    image, weight = (2, 4, 5, 4), (4, 3, 3, 2)
    strides, dilations = options.get("strides", [1, 1]), options.get("dilations", [1, 1])
    top, left, bottom, right = options.get("pads", [0, 0, 0, 0])
    more = options.get("output_padding", [0, 0])
    dims = "n, 4, h, w" if dynamic else "2, 4, 5, 4"
    model = model_of(
        f"float[{dims}] a, float[4, 3, 3, 2] b, float[{3 * group}] c",
        f"y = ConvTranspose <{_attributes({**options, 'group': group})}> (a, b, c)",
    )

    def by_torch(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        full = F.conv_transpose2d(a, b, None, strides, 0, more, group, dilations)
        height, width = full.shape[2:]
        return full[:, :, top : height - bottom, left : width - right] + c.reshape(-1, 1, 1)

    require_torchs(model, shaped(image, weight, (3 * group,)), by_torch, ["a", "b", "c"])


@pytest.mark.parametrize("kernel, stride, padding", [(3, 2, 1), (2, 2, 0), (3, 3, 1), (2, 3, 1), (4, 1, 2)])
@pytest.mark.parametrize("ceil_mode", [0, 1])
@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("dynamic", [True, False])
def test_average_pooling(kernel: int, stride: int, padding: int, ceil_mode: int, include: int, dynamic: bool) -> None:
    options = {
        "kernel_shape": [kernel] * 2,
        "strides": [stride] * 2,
        "pads": [padding] * 4,
        "ceil_mode": ceil_mode,
        "count_include_pad": include,
    }
    dims = "n, 3, h, w" if dynamic else "2, 3, 7, 8"
    # onnx infers one place more than onnxruntime and torch have where the last window would begin in the padding.
    output = "float[n, 3, p, q] y"
    model = model_of(f"float[{dims}] a", f"y = AveragePool <{_attributes(options)}> (a)", 19, output)

    def by_torch(a: Tensor) -> Tensor:
        return F.avg_pool2d(a, kernel, stride, padding, bool(ceil_mode), bool(include))

    require_torchs(model, shaped((2, 3, 7, 8)), by_torch, ["a"])


KERNEL = torch.tensor(numbers(2, 2, 3, 3, seed=5))
OTHERWISE: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "all axes": (
        "y = AveragePool <kernel_shape = [2, 3], strides = [2, 3], pads = [1, 1, 1, 1], ceil_mode = 1> (h)",
        lambda h: F.avg_pool2d(h, (2, 3), (2, 3), 1, True, False),
    ),
    "beside one that counts": (
        "y = AveragePool <kernel_shape = [2, 3], strides = [2, 2], pads = [1, 0, 1, 0], ceil_mode = 1, "
        "count_include_pad = 1> (h)",
        lambda h: F.avg_pool2d(h, (2, 3), 2, (1, 0), True, True),
    ),
    "maxima": (
        "y = MaxPool <kernel_shape = [2, 3], strides = [2, 3], pads = [1, 1, 1, 1], ceil_mode = 1> (h)",
        lambda h: F.max_pool2d(h, (2, 3), (2, 3), 1, 1, True),
    ),
    "norms": (
        "y = LpPool <kernel_shape = [1, 1], strides = [4, 3], p = 1, ceil_mode = 1> (h)",
        lambda h: h[:, :, ::4, ::3][:, :, :2, :3].abs(),
    ),
    "behind the image, beside one that counts": (
        "y = AveragePool <kernel_shape = [1, 3], strides = [4, 2], ceil_mode = 1> (h)",
        lambda h: F.avg_pool2d(h, (1, 3), (4, 2), 0, True),
    ),
    "transposed, lower": (
        'y = ConvTranspose <strides = [2, 2], output_padding = [1, 1], auto_pad = "SAME_LOWER"> (h, k)',
        lambda h: F.conv_transpose2d(h, KERNEL.to(h.dtype), None, 2, 0, 1)[:, :, 1:-1, 1:-1],
    ),
    "transposed, upper": (
        'y = ConvTranspose <strides = [3, 2], output_padding = [2, 0], auto_pad = "SAME_UPPER"> (h, k)',
        lambda h: F.conv_transpose2d(h, KERNEL.to(h.dtype), None, (3, 2), 0, (2, 0))[:, :, 1:-1, :-1],
    ),
}
"""Windows of which onnx infers other sizes than onnxruntime gives."""


@pytest.mark.parametrize("name", OTHERWISE)
@pytest.mark.parametrize("opset", [18, 22])
def test_steps_have_the_sizes_that_onnxruntime_gives(name: str, opset: int) -> None:
    body, by_torch = OTHERWISE[name]
    model = model_of("float[n, 2, 7, 8] x", f"h = Mul (x, w) {body}", opset, "float[n, 2, p, q] y")
    # As files have it that onnx has inferred.
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    w, x = numbers(1, 2, 1, 1, seed=1), numbers(3, 2, 7, 8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    if "k)" in body:
        model.graph.initializer.append(onnx.numpy_helper.from_array(KERNEL.numpy(), "k"))
    model = onnx.shape_inference.infer_shapes(model)
    y = run(model, {"x": x}, by_onnx=False)["y"]
    session = TrainingSession(build_training_step(model, "mse", trainable=["w"]))
    np.testing.assert_array_equal(session.evaluate(x), y)
    assert session.step(x, y) < 1e-10
    session.step(x, np.zeros_like(y))
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaf = torch.tensor(w, dtype=dtype, requires_grad=True)
        output = by_torch(torch.tensor(x, dtype=dtype) * leaf)
        assert output.shape == y.shape
        output.square().mean().backward()  # type: ignore[no-untyped-call]
        gradients.append(leaf.grad)
    native, exact = gradients
    assert native is not None and exact is not None
    assert_gradients_close(
        session.gradients["w"], native.numpy(), exact.numpy(), np.float32, terms=16 * float(exact.abs().max())
    )


@pytest.mark.parametrize(
    "options, covers, by_torch",
    [
        ({"kernel_shape": [7, 8]}, True, lambda a: F.avg_pool2d(a, (7, 8))),
        (
            {"kernel_shape": [900, 900], "strides": [900, 900], "ceil_mode": 1},
            True,
            lambda a: F.avg_pool2d(a, 900, 900, ceil_mode=True),
        ),
        (
            {"kernel_shape": [9, 10], "strides": [2, 2], "pads": [1] * 4, "count_include_pad": 1},
            True,
            lambda a: F.avg_pool2d(a, (9, 10), 2, 1),
        ),
        ({"kernel_shape": [9, 10], "strides": [2, 2], "pads": [1] * 4}, True, lambda a: F.avg_pool2d(a, (7, 8))),
        ({"kernel_shape": [7, 7], "strides": [2, 2]}, False, lambda a: F.avg_pool2d(a[..., :7], 7)),
        (
            {"kernel_shape": [7, 8], "strides": [2, 2], "pads": [1, 0, 0, 0]},
            False,
            lambda a: F.avg_pool2d(a[:, :, :6], (6, 8)),
        ),
        (
            {"kernel_shape": [4, 4], "strides": [2, 2], "dilations": [2, 2]},
            False,
            lambda a: F.avg_pool2d(a[:, :, ::2, ::2], 4),
        ),
    ],
)
def test_average_pooling_by_one_window(
    options: Mapping[str, Any], covers: bool, by_torch: Callable[[Tensor], Tensor]
) -> None:
    """Where it spans the image, its size does not matter: transformers' EfficientNet has one of 2560 x 2560."""
    model = model_of("float[n, 3, 7, 8] a", f"y = AveragePool <{_attributes(options)}> (a)", 19)
    require_torchs(model, shaped((2, 3, 7, 8)), by_torch, ["a"])
    operators = {node.op_type for node in differentiate(model, ["a"], seeds={"y": "dy"}).graph.node}
    assert ("ConvTranspose" in operators) is not covers


@pytest.mark.parametrize("kernel, stride, padding, dilation", [(3, 2, 1, 1), (2, 2, 0, 1), (2, 1, 0, 2), (3, 3, 1, 2)])
@pytest.mark.parametrize("ceil_mode", [0, 1])
def test_max_pooling_with_ties(kernel: int, stride: int, padding: int, dilation: int, ceil_mode: int) -> None:
    options = {
        "kernel_shape": [kernel] * 2,
        "strides": [stride] * 2,
        "pads": [padding] * 4,
        "dilations": [dilation] * 2,
        "ceil_mode": ceil_mode,
    }
    model = model_of("float[n, 3, h, w] a", f"y = MaxPool <{_attributes(options)}> (a)")
    feeds = {"a": np.round(numbers(2, 3, 7, 8))}

    def by_torch(a: Tensor) -> Tensor:
        return F.max_pool2d(a, kernel, stride, padding, dilation, bool(ceil_mode))

    require_torchs(model, feeds, by_torch, ["a"])


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("indices", [[0, 0, 3], [-1, -4, 2], [[0, -1], [-1, 3]], []])
def test_gather_adds_up_what_is_taken_twice(axis: int, indices: Any) -> None:
    taken = np.array(indices, np.int64)
    dims = ", ".join(map(str, taken.shape))
    model = model_of(f"float[K, L, M] a, int64[{dims}] i", f"y = Gather <axis = {axis}> (a, i)")

    def by_torch(a: Tensor, i: Tensor) -> Tensor:
        flat = torch.index_select(a, axis, i.flatten() % 4)
        at = axis % 3
        return flat.reshape(*a.shape[:at], *i.shape, *a.shape[at + 1 :])

    require_torchs(model, {**shaped((4, 4, 4)), "i": taken}, by_torch, ["a"])


def test_indices_that_are_negative_elsewhere() -> None:
    i = np.array([[-1, 0, 2], [1, 1, -3]], np.int64)
    model = model_of("float[4, 3] a, int64[2, 3] i", "y = GatherElements <axis = 0> (a, i)")
    feeds = {**shaped((4, 3)), "i": i}
    require_torchs(model, feeds, lambda a, i: torch.gather(a, 0, i % 4), ["a"])
    pairs = np.array([[-1, 0], [1, -1], [3, 0]], np.int64)
    model = model_of("float[4, 3] a, int64[3, 2] i", "y = GatherND(a, i)")
    require_torchs(model, {**feeds, "i": pairs}, lambda a, i: a[i[:, 0] % 4, i[:, 1] % 3], ["a"])


@pytest.mark.parametrize(
    "data, column, spread, axis, by_rows",
    [
        ((4, 5, 6), (1, 5, 1), (1, 5, 6), 0, True),
        ((4, 5, 6), (1, 3, 1), (1, 3, 6), 0, True),
        ((4, 5, 6), (2, 1, 1), (2, 1, 6), 1, True),
        ((4, 5, 6), (1, 1, 1), (4, 1, 6), 1, True),
        ((4, 5, 6), (1, 1, 1), (1, 5, 6), 0, True),
        ((4, 5, 6), (1, 1, 1), (1, 5, 1), 0, False),
        ((4, 5, 6), (1, 5, 1), (1, 5, 4), 0, False),
        ((4, 5, 6), (1, 5, 6), (1, 5, 6), 0, False),
        ((4, 5, 6), (4, 5, 1), (4, 5, 1), 2, False),
        ((4, 5, 6), (2, 5, 1), (2, 5, 6), 0, False),
        ((4, 5, 6), (5, 1), (1, 5, 6), 0, False),
        ((7, 6), (1, 1), (1, 6), 0, True),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_an_index_that_is_repeated_reads_rows(
    data: tuple[int, ...],
    column: tuple[int, ...],
    spread: tuple[int, ...],
    axis: int,
    by_rows: bool,
    named: bool,
) -> None:
    """Sizes of all but the last axis may be unknown."""
    number = data[axis]
    i = np.random.default_rng(0).integers(-number, number, column)
    dims = ["N" if named and size == 5 else str(size) for size in data]
    given = ["N" if named and size == 5 else str(size) for size in column]
    model = model_of(
        f"float[{', '.join(dims)}] a, int64[{', '.join(given)}] i",
        f"s = Constant <value_ints = [{', '.join(map(str, spread))}]> () e = Expand(i, s) "
        f"y = GatherElements <axis = {axis}> (a, e)",
    )
    expanded = [1] * (len(spread) - len(column)) + list(column)

    def by_torch(a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.gather(a, axis, i.reshape(expanded).expand(spread) % number)

    require_torchs(model, {**shaped(data), "i": i}, by_torch, ["a"])
    nodes = [node.op_type for node in differentiate(model, ["a"], seeds={"y": "seed"}).graph.node]
    assert ("ScatterND" in nodes) == by_rows


@pytest.mark.parametrize("op, by_torch", [("ReduceMax", torch.amax), ("ReduceMin", torch.amin)])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [[0], [1, 2], [-1], []])
def test_equal_extremes_share(op: str, by_torch: Any, keepdims: int, axes: list[int]) -> None:
    feeds = {"a": np.round(numbers(3, 4, 5))}
    constant = f"k = Constant <value_ints = {axes}> ()" if axes else ""
    model = model_of("float[L, M, N] a", f"{constant} y = {op} <keepdims = {keepdims}> (a{', k' if axes else ''})")
    require_torchs(model, feeds, lambda a: by_torch(a, axes or [0, 1, 2], keepdim=bool(keepdims)), ["a"])


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceProd", "ReduceSum", "ReduceL2"])
def test_axes_that_are_inputs(op: str) -> None:
    model = model_of("float[L, M, N] a, int64[K] k", f"y = {op} <keepdims = 1> (a, k)", 18, "float[A, B, C] y")
    by_torch: Mapping[str, ByTorch] = {
        "ReduceMean": lambda a, k: a.mean((0, 2), keepdim=True),
        "ReduceSum": lambda a, k: a.sum((0, 2), keepdim=True),
        "ReduceL2": lambda a, k: a.norm(2, (0, 2), keepdim=True),
        "ReduceProd": lambda a, k: a.prod(0, keepdim=True).prod(2, keepdim=True),
    }
    require_torchs(model, {**shaped((3, 4, 5)), "k": np.array([0, -1])}, by_torch[op], ["a"])


def test_products_with_zeros() -> None:
    a = numbers(4, 3)
    a[1, 0] = a[2, 0] = a[3, 1] = 0
    model = model_of("float[N, 3] a", "k = Constant <value_ints = [0]> () y = ReduceProd <keepdims = 0> (a, k)")
    require_torchs(model, {"a": a}, lambda a: a.prod(0), ["a"])


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opset", [11, 12, 13, 25])
@pytest.mark.parametrize("axis", [0, 1, 2, None])
def test_softmax_of_all_opsets(op: str, opset: int, axis: int | None) -> None:
    chosen = "" if axis is None else f"<axis = {axis}>"
    model = model_of("float[2, 3, 4] a", f"y = {op} {chosen} (a)", opset=opset, output="float[2, 3, 4] y")

    def by_torch(a: Tensor) -> Tensor:
        function = torch.softmax if op == "Softmax" else torch.log_softmax
        if opset >= 13:
            return function(a, -1 if axis is None else axis)
        # All axes from this one on are one.
        rows = a.reshape(int(np.prod(a.shape[: 1 if axis is None else axis])), -1)
        return function(rows, 1).reshape(a.shape)

    require_torchs(model, shaped((2, 3, 4)), by_torch, ["a"])


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 12, 13, 15, 17, 18, 20, 21, 22, 23, 25])
def test_all_opsets(opset: int) -> None:
    """Squeeze, Unsqueeze, ReduceMean, Clip and Dropout have changed; Cast and Relu got new types only."""
    axes = "" if opset >= 13 else "<axes = [1]>"
    mean_axes = "" if opset >= 18 else ", axes = [2]"
    clip = "Clip (f, low, high)" if opset >= 11 else "Clip <min = -0.5, max = 0.5> (f)"
    model = model_of(
        "float[N, 4] a, float[4, 4] b",
        f"""c = MatMul(a, b) d = Relu(c)
        k = Constant <value = int64[1] {{1}}> () m = Constant <value = int64[1] {{2}}> ()
        e = Unsqueeze {axes} (d{", k" if opset >= 13 else ""})
        e2 = Dropout (e)
        f = Squeeze {axes} (e2{", k" if opset >= 13 else ""})
        low = Constant <value = float {{-0.5}}> () high = Constant <value = float {{0.5}}> ()
        g = {clip}
        h = Reshape(g, s) s2 = Constant <value = int64[1] {{1}}> ()
        y = ReduceMean <keepdims = 0{mean_axes}> (h{", m" if opset >= 18 else ""})""",
        opset=opset,
        output="float[N, 2] y",
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 2, 2]), "s"))
    if opset < 9:
        model.ir_version = 3
        model.graph.input.append(onnx.helper.make_tensor_value_info("s", onnx.TensorProto.INT64, [3]))
    kept = [node for node in model.graph.node if node.output[0] in "c d e e2 f g h y".split()]
    used = {name for node in kept for name in node.input}
    kept = [node for node in model.graph.node if node in kept or node.output[0] in used]
    # Constants ahead of what uses them.
    kept.sort(key=lambda node: node.op_type != "Constant")
    del model.graph.node[:]
    model.graph.node.extend(kept)
    feeds = shaped((3, 4), (4, 4))

    def by_torch(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).relu().clamp(-0.5, 0.5).reshape(-1, 2, 2).mean(2)

    require_torchs(model, feeds, by_torch, ["a", "b"])


def test_upsampling_of_old_opsets() -> None:
    model = model_of(
        "float[2, 3, 4, 5] a, float[4] s", 'y = Upsample <mode = "nearest"> (a, s)', 9, "float[2, 3, 8, 15] y"
    )
    feeds = {**shaped((2, 3, 4, 5)), "s": np.array([1, 1, 2, 3], np.float32)}
    require_torchs(model, feeds, lambda a, s: F.interpolate(a, scale_factor=(2, 3)), ["a"])


@pytest.mark.parametrize("low", ["", "low"])
@pytest.mark.parametrize("high", ["", "high"])
def test_clip_with_bounds_left_out(low: str, high: str) -> None:
    given = [name for name in (low, high) if name]
    declared = "".join(f", float {name}" for name in given)
    inputs = f"a, {low}, {high}" if high else f"a, {low}" if low else "a"
    model = model_of(f"float[N] a{declared}", f"y = Clip({inputs})".replace(", ,", ', "",'))
    bounds = {"low": np.array(-0.5, np.float32), "high": np.array(0.75, np.float32)}
    feeds = {"a": numbers(9), **{name: bounds[name] for name in given}}

    def by_torch(a: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
        return a.clone() if low is None and high is None else torch.clamp(a, low, high)

    require_torchs(model, feeds, by_torch, ["a", *given])


def test_outputs_that_are_left_out_or_not_used() -> None:
    model = model_of("float[6, 4] a", "k = Constant <value_ints = [3]> () t, i = TopK(a, k) y = Mul(t, t)")
    require_torchs(model, shaped((6, 4)), lambda a: a.topk(3).values ** 2, ["a"])
    model = model_of("float[6, 4] a", "p, q, r = Split <num_outputs = 3> (a) y = Mul(q, q)")
    require_torchs(model, shaped((6, 4)), lambda a: a[2:4] ** 2, ["a"])
    model = model_of("float[6, 4] a, float[4] b", "y, m = LayerNormalization(a, b)")
    require_torchs(model, shaped((6, 4), (4,)), lambda a, b: F.layer_norm(a, (4,), b), ["a", "b"])


def test_integers_carry_no_gradient() -> None:
    model = model_of(
        "float[5, 4] a",
        """i = Cast <to = 7> (a) k = ArgMax <axis = 1, keepdims = 0> (a) five = Constant <value_int = 5> ()
        s = Shape(a) f = Cast <to = 1> (s) z = Constant <value_int = 0> () n = Gather(f, z)
        p = Gather(a, k2) y = Mul(p, n)""".replace("k2", "k").replace("Gather(a, k)", "Gather <axis = 1> (a, z)"),
    )
    require_torchs(model, shaped((5, 4)), lambda a: a[:, 0] * 5, ["a"])


def test_rows_that_are_masked_throughout_have_no_gradient() -> None:
    """As torch.export writes scaled_dot_product_attention with boolean masks."""
    model = model_of(
        "float[2, 3] a, bool[2, 3] m",
        """low = Constant <value = float {-inf}> () zero = Constant <value = float {0}> ()
        b = Where(m, a, low) s = Softmax(b) n = IsNaN(s) y = Where(n, zero, s)""",
    )
    feeds = {**shaped((2, 3)), "m": np.array([[True, False, True], [False] * 3])}

    def by_torch(a: Tensor, m: Tensor) -> Tensor:
        return torch.cat([torch.softmax(a[:1].masked_fill(~m[:1], -torch.inf), 1), torch.zeros_like(a[1:])])

    require_torchs(model, feeds, by_torch, ["a"])


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap", "constant"])
def test_padding(mode: str) -> None:
    model = model_of("float[2, 3, 4, 5] a, int64[8] p", f'y = Pad <mode = "{mode}"> (a, p)', opset=19)
    feeds = {**shaped((2, 3, 4, 5)), "p": np.array([0, 0, 1, 2, 0, 0, 3, 1])}
    torchs = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
    require_torchs(model, feeds, lambda a, p: F.pad(a, (2, 1, 1, 3), torchs), ["a"])


def test_padding_by_less_than_nothing() -> None:
    model = model_of("float[4, 5] a, int64[4] p, float c", "y = Pad(a, p, c)")
    feeds = {**shaped((4, 5)), "p": np.array([-1, 2, 1, -1]), "c": np.array(3, np.float32)}

    def by_torch(a: Tensor, p: Tensor, c: Tensor) -> Tensor:
        inner = a[1:, :-1]
        whole = c.expand(4, 6).clone()
        return torch.cat([torch.cat([whole[:3, :2], inner], 1), whole[:1]], 0)

    require_torchs(model, feeds, by_torch, ["a", "c"])


def test_where_and_expand_with_sizes_of_1() -> None:
    model = model_of("bool[A, B] m, float[C, D] a, float[E] b", "y = Where(m, a, b)")
    feeds = {**shaped((1, 4), (1,)), "m": numbers(3, 1) > 0}
    require_torchs(model, feeds, lambda m, a, b: torch.where(m, a, b), ["a", "b"])
    model = model_of("float[A, B] a, int64[3] s", "y = Expand(a, s)")
    for shape in ((1, 4), (3, 1), (3, 4)):
        feeds = {**shaped(shape), "s": np.array([2, 3, 4])}
        require_torchs(model, feeds, lambda a, s: a.expand(2, 3, 4), ["a"])


def test_without_elements() -> None:
    model = model_of("float[N, 4] a, float[4, 3] b", "y = MatMul(a, b)", output="float[N, 3] y")
    require_torchs(model, shaped((0, 4), (4, 3)), lambda a, b: a @ b, ["a", "b"])


def microsoft(inputs: str, body: str, shape: str) -> onnx.ModelProto:
    """A model with operators of onnxruntime's own, of which onnx infers no shapes."""
    text = (
        f'<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> g ({inputs}) => (float[{shape}] y) {{ {body} }}'
    )
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("trans_a, trans_b", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("batch_a, batch_b", [((), ()), ((2,), (2,)), ((2,), ()), ((1,), (2,)), ((3, 1), (2,))])
def test_fused_matmul(trans_a: int, trans_b: int, batch_a: Any, batch_b: Any) -> None:
    a = (*batch_a, *((3, 4) if trans_a else (4, 3)))
    b = (*batch_b, *((5, 3) if trans_b else (3, 5)))
    dims = [", ".join(f"{n}{k}" for k in range(len(shape))) for n, shape in (("a", a), ("b", b))]
    rank = max(len(a), len(b))
    model = microsoft(
        f"float[{dims[0]}] a, float[{dims[1]}] b",
        f"y = com.microsoft.FusedMatMul <alpha = 0.5, transA = {trans_a}, transB = {trans_b}> (a, b)",
        ", ".join(f"y{k}" for k in range(rank)),
    )

    def by_torch(a: Tensor, b: Tensor) -> Tensor:
        return 0.5 * (a.mT if trans_a else a) @ (b.mT if trans_b else b)

    require_torchs(model, shaped(a, b), by_torch, ["a", "b"])


@pytest.mark.parametrize("simplified", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_sum", [True, False])
def test_skip_layer_normalization(simplified: bool, bias: bool, with_sum: bool) -> None:
    op = "com.microsoft.Skip" + ("SimplifiedLayerNormalization" if simplified else "LayerNormalization")
    names = ["a", "b", "gamma", *([] if simplified else ["beta"]), *(["bias"] if bias else [])]
    shapes = [(2, 3, 8), (2, 3, 8), *[(8,)] * (len(names) - 2)]
    declared = ", ".join(
        f"float[{', '.join(map(str, shape))}] {name}" for name, shape in zip(names, shapes, strict=True)
    )
    body = f'n, "", "", s = {op} <epsilon = 1e-5> ({", ".join(names)}) y = Mul(n, s)' if with_sum else ""
    body = body or f"y = {op} <epsilon = 1e-5> ({', '.join(names)})"
    feeds = {name: numbers(*shape, seed=k) for k, (name, shape) in enumerate(zip(names, shapes, strict=True))}

    def by_torch(a: Tensor, b: Tensor, gamma: Tensor, beta: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        total = a + b if bias is None else a + b + bias
        norm = F.rms_norm(total, (8,), gamma, 1e-5) if simplified else F.layer_norm(total, (8,), gamma, beta, 1e-5)
        return norm * total if with_sum else norm

    require_torchs(microsoft(declared, body, "2, 3, 8"), feeds, by_torch, names)


def test_simplified_layer_normalization() -> None:
    model = microsoft(
        "float[N, 3, 8] a, float[8] b", "y = SimplifiedLayerNormalization <epsilon = 1e-5> (a, b)", "N, 3, 8"
    )
    require_torchs(model, shaped((2, 3, 8), (8,)), lambda a, b: F.rms_norm(a, (8,), b, 1e-5), ["a", "b"])


@pytest.mark.parametrize("op, exact", [("Gelu", "none"), ("FastGelu", "tanh")])
def test_gelu_of_onnxruntime(op: str, exact: str) -> None:
    model = microsoft("float[N, 8] a", f"y = com.microsoft.{op} (a)", "N, 8")
    require_torchs(model, shaped((4, 8)), lambda a: F.gelu(a, approximate=exact), ["a"])


@pytest.mark.parametrize("op, exact", [("BiasGelu", "none"), ("FastGelu", "tanh")])
def test_gelu_with_a_bias(op: str, exact: str) -> None:
    model = microsoft("float[N, 8] a, float[8] b", f"y = com.microsoft.{op} (a, b)", "N, 8")
    require_torchs(model, shaped((4, 8), (8,)), lambda a, b: F.gelu(a + b, approximate=exact), ["a", "b"])


def test_quick_gelu() -> None:
    model = microsoft("float[N, 8] a", "y = com.microsoft.QuickGelu <alpha = 1.5> (a)", "N, 8")
    require_torchs(model, shaped((4, 8)), lambda a: a * torch.sigmoid(1.5 * a), ["a"])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_branches_that_read_what_is_around_them(first: bool, second: bool) -> None:
    model = model_of(
        "float[N, 3] a, float[3] b, float[3] c, bool p, bool q",
        """d = Tanh(a)
        y = If (p) <
            then_branch = one () => (float[N, 3] t) { e = Mul(d, b) t = Mul(e, e) },
            else_branch = two () => (float[N, 3] u) {
                u = If (q) <
                    then_branch = three () => (float[N, 3] r) { r = Mul(a, c) },
                    else_branch = four () => (float[N, 3] s) { s = Identity(d) }
                >
            }
        >""",
        output="float[N, 3] y",
    )
    feeds = {**shaped((4, 3), (3,), (3,)), "p": np.array(first), "q": np.array(second)}

    def by_torch(a: Tensor, b: Tensor, c: Tensor, p: Tensor, q: Tensor) -> Tensor:
        d = a.tanh()
        taken = (d * b) ** 2 if p else a * c if q else d
        return taken + 0 * (a.sum() + b.sum() + c.sum())

    require_torchs(model, feeds, by_torch, ["a", "b", "c"])


def test_a_branch_that_draws_numbers_is_refused() -> None:
    model = model_of(
        "float[N, 3] a, bool p",
        """y = If (p) <
            then_branch = one () => (float[N, 3] t) { n = RandomNormalLike(a) t = Mul(a, n) },
            else_branch = two () => (float[N, 3] u) { u = Identity(a) }
        >""",
        output="float[N, 3] y",
    )
    with pytest.raises(ModelError, match=r"RandomNormalLike .*draws numbers within If"):
        differentiate(model, ["a"], seeds={"y": "v"})


SPLITS = {
    "sizes": "sizes = Constant<value_ints = [1, 2]>() parts = SplitToSequence<axis = 1>(x, sizes)",
    "one size": "size = Constant<value_int = 2>() parts = SplitToSequence<axis = 1>(x, size)",
    "slices": "parts = SplitToSequence<axis = 1, keepdims = 0>(x)",
    "parts": """
        zero = Constant<value_ints = [0]>()  one = Constant<value_ints = [1]>()  end = Constant<value_ints = [3]>()
        left = Slice(x, zero, one, one)  right = Slice(x, one, end, one)
        parts = SequenceConstruct(left, right)
    """,
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("index", [0, 1, -1])
def test_elements_of_split_tensors(name: str, index: int) -> None:
    body = f"""
        {SPLITS[name]}
        first = Constant<value_int = {index}>()
        part = SequenceAt(parts, first)  again = SequenceAt(parts, first)
        square = Mul(part, again)
        y = ReduceSum<keepdims = 0>(square)
    """

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        cuts = {"one size": [(0, 2), (2, 3)], "slices": [(0, 1), (1, 2), (2, 3)]}.get(name, [(0, 1), (1, 3)])
        begin, end = cuts[index]
        return x[:, begin:end].square().sum()

    require_torchs(model_of("float[4, 3] x", body, output="float y"), {"x": numbers(4, 3)}, by_torch, ["x"])


@pytest.mark.parametrize("taken", [True, False])
def test_sequences_from_outside_a_branch(taken: bool) -> None:
    body = """
        size = Constant<value_int = 2>()  zero = Constant<value_int = 0>()  end = Constant<value_int = -1>()
        parts = SplitToSequence<axis = 1>(x, size)  both = SequenceConstruct(x, z)
        y = If(p) <
            then_branch = one () => (float[4, a] t) { left = SequenceAt(parts, zero) t = Mul(left, left) },
            else_branch = two () => (float[4, b] u) {
                last = SequenceAt(parts, end) joined = ConcatFromSequence<axis = 1>(both) u = Mul(joined, last)
            }
        >
    """
    model = model_of("float[4, 5] x, float[4, 1] z, bool p", body, output="float[4, c] y")
    feeds = {"x": numbers(4, 5), "z": numbers(4, 1, seed=1), "p": np.array(taken)}

    def by_torch(x: Tensor, z: Tensor, p: Tensor) -> Tensor:
        return x[:, :2].square() + 0 * z.sum() if p else torch.cat([x, z], 1) * x[:, 4:]

    require_torchs(model, feeds, by_torch, ["x", "z"])


@pytest.mark.parametrize("made", ["SequenceConstruct(x, x)", "SplitToSequence(x, sizes)"])
def test_an_element_that_a_sequence_lacks_is_refused(made: str) -> None:
    body = f"sizes = Constant<value_ints = [1, 3]>()  at = Constant<value_int = 2>()  s = {made}  y = SequenceAt(s, at)"
    with pytest.raises(ModelError, match=r"SequenceAt .*: its index is 2, of a sequence of 2"):
        differentiate(model_of("float[4, 3] x", body, output="float[a, 3] y"), ["x"], seeds={"y": "v"})


def test_joined_sequences() -> None:
    body = "parts = SequenceConstruct(x, z, x) y = ConcatFromSequence<axis = 0>(parts)"
    feeds = {"x": numbers(2, 3), "z": numbers(4, 3, seed=1)}
    model = model_of("float[2, 3] x, float[4, 3] z", body, output="float[8, 3] y")
    require_torchs(model, feeds, lambda x, z: torch.cat([x, z, x]), ["x", "z"])


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize("more", [(), (2,)])
def test_weights_of_classes_have_gradients(op: str, reduction: str, ignored: bool, more: tuple[int, ...]) -> None:
    """torch refuses to differentiate by them, so that the loss is written out; class 2 has no label."""
    labels = np.resize(np.array([1, 0, 3, 1, 3, 0]), (5, *more))

    def by_torch(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        log_prob = x.log_softmax(1) if op.startswith("Softmax") else x
        counted = (t != 3) if ignored else torch.ones_like(t, dtype=torch.bool)
        rows = torch.where(counted, w[t], 0.0)
        loss = -log_prob.gather(1, t.unsqueeze(1)).squeeze(1) * rows
        total = loss.sum()
        return loss if reduction == "none" else total / rows.sum() if reduction == "mean" else total

    attributes = f'reduction = "{reduction}"' + (", ignore_index = 3" if ignored else "")
    sizes = "".join(f", {size}" for size in more)
    model = model_of(
        f"float[5, 4{sizes}] x, float[4] w, int64[5{sizes}] t",
        f"y = {op}<{attributes}>(x, t, w)",
        output="float y" if reduction != "none" else f"float[5{sizes}] y",
    )
    feeds = {"x": numbers(5, 4, *more), "w": np.abs(numbers(4, seed=1)) + 0.5, "t": labels}
    require_torchs(model, feeds, by_torch, ["x", "w"])
    require_torchs(model, feeds, by_torch, ["w"])


def test_a_body_follows_from_the_rank_and_not_from_a_wrong_declaration() -> None:
    """That of RotaryEmbedding; onnxruntime ignores the declaration, with a warning."""
    body = "h = Mul (x, w) y = RotaryEmbedding <num_heads = 2> (h, c, s)"
    inputs = "float[2, 3, 8] x, float[8] w, float[2, 3, 2] c, float[2, 3, 2] s"
    model = model_of(inputs, body, 23, "float[2, 3, 8] y", "float[2, 2, 3, 4] h")

    def by_torch(x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, b = (x * w).reshape(2, 3, 2, 4).chunk(2, -1)
        c, s = c.unsqueeze(2), s.unsqueeze(2)
        return torch.cat([c * a - s * b, s * a + c * b], -1).reshape(2, 3, 8)

    shapes = {"x": (2, 3, 8), "w": (8,), "c": (2, 3, 2), "s": (2, 3, 2)}
    feeds = {name: numbers(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    require_torchs(model, feeds, by_torch, ["x", "w"])
