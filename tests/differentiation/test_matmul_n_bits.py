"""Gradients through MatMulNBits, against weights that numpy dequantises in float64 and onnxruntime's own forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper
from quantised import Array, Infos, model_of, quantised

from gradfuse import ArgumentError, ModelError, TrainingSession, build_training_step, differentiate, register
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")


def run(model: onnx.ModelProto, feeds: dict[str, Array], *, kernels: bool = False) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if kernels:
        register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def product(
    dtype: Any = np.float32, bias: bool = False, opset: int = 18, **options: Any
) -> tuple[Any, onnx.ModelProto]:
    """`y = x W^T (+ b)` of x (M, R, K), and the weight W."""
    weight = quantised(5, options.pop("columns", 40), dtype=np.dtype(dtype).name, **options)
    tensors = weight.initializers()
    if bias:
        tensors.append(numpy_helper.from_array(np.arange(5, dtype=dtype), "b"))
    node = weight.node("x", "y", "b" if bias else "")
    shapes: dict[str, Infos] = {
        "x": {"x": (dtype, ["M", "R", weight.attributes["K"]])},
        "y": {"y": (dtype, ["M", "R", 5])},
    }
    return weight, model_of([node], shapes["x"], shapes["y"], tensors, opset)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bits, zeros", [(2, "packed"), (4, "none"), (4, "packed"), (4, "float"), (8, "packed")])
@pytest.mark.parametrize("columns, opset", [(64, 17), (40, 21)])
def test_the_input_and_the_bias_have_gradients(bits: int, zeros: str, columns: int, opset: int, dtype: Any) -> None:
    """40 columns are blocks of 16 of which the last is not full, and an odd number of zero points."""
    weight, model = product(dtype, True, opset, columns=columns, bits=bits, zero_points=zeros)
    rng = np.random.default_rng(1)
    x, v = (rng.standard_normal((2, 3, size)).astype(dtype) for size in (columns, 5))
    found = run(differentiate(model, ["x", "b"], seeds={"y": "v"}), {"x": x, "v": v})
    bias = np.arange(5)
    exact, native = x.astype(float) @ weight.weight.T + bias, x @ weight.weight.T.astype(dtype) + bias.astype(dtype)
    assert_gradients_close(found["y"], native, exact, dtype, terms=columns * np.abs(exact).max())
    by_x, native_by_x = v.astype(float) @ weight.weight, v @ weight.weight.astype(dtype)
    assert_gradients_close(found["x.grad"], native_by_x, by_x, dtype, terms=5 * np.abs(by_x).max())
    by_bias = v.astype(float).sum((0, 1))
    assert_gradients_close(found["b.grad"], v.sum((0, 1)), by_bias, dtype, terms=6 * np.abs(v.astype(float)).max())


def test_flat_scales_and_zero_points_of_older_files_are_read() -> None:
    weight, model = product(zero_points="packed")
    for tensor in model.graph.initializer:
        if not tensor.name.endswith("Q4"):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).ravel(), tensor.name))
    x, v = np.ones((1, 2, 40), np.float32), np.ones((1, 2, 5), np.float32)
    found = run(differentiate(model, ["x"], seeds={"y": "v"}), {"x": x, "v": v})
    exact = v.astype(float) @ weight.weight
    assert_gradients_close(found["x.grad"], v @ weight.weight.astype(np.float32), exact, np.float32, terms=8)


def test_dequantised_weights_are_not_computed_ahead(tmp_path: Any) -> None:
    """onnxruntime folds what depends on constants alone, and would hold every weight in full."""
    weight = quantised(64, 64)
    info = {"x": (np.float32, [2, 64])}, {"y": (np.float32, [2, 64])}
    model = model_of([weight.node("x", "y")], *info, weight.initializers())
    result = differentiate(model, ["x"], seeds={"y": "v"})
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(result.SerializeToString(), options, providers=["CPUExecutionProvider"])
    largest = max(tensor.ByteSize() for tensor in onnx.load(tmp_path / "optimised.onnx").graph.initializer)
    assert largest < 64 * 64 * 0.6, "a byte or more a weight"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bits": 3}, r"com.microsoft::MatMulNBits \(node 'y_node'\): bits is 3; expected 2, 4 or 8"),
        ({"weight_prepacked": 1}, "weight_prepacked is 1; expected 0"),
        ({"block_size": 0}, "it has no block_size; expected weight, scales and their sizes"),
        ({"g_idx": 1}, "g_idx is given; expected blocks"),
    ],
)
def test_what_the_rule_does_not_take_is_named(change: dict[str, int], message: str) -> None:
    _, model = product(zero_points="packed")
    node = model.graph.node[0]
    if "g_idx" in change:
        node.input.append("g")
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(40, np.int32), "g"))
    else:
        for name, value in change.items():
            kept = [attribute for attribute in node.attribute if attribute.name != name]
            del node.attribute[:]
            node.attribute.extend([*kept, *([onnx.helper.make_attribute(name, value)] if value else [])])
    with pytest.raises(ModelError, match=message) as error:
        differentiate(model, ["x"], seeds={"y": "v"})
    assert "\n" not in str(error.value)


def test_the_quantised_weight_is_frozen() -> None:
    _, model = product(bias=True)
    assert set(build_training_step(model, "mse").parameters) == {"b"}
    with pytest.raises(ArgumentError, match="the loss does not depend on 'w_scales'"):
        build_training_step(model, "mse", trainable=["w_scales"])


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("zeros", ["none", "packed"])
def test_a_fused_step_has_one_operator_for_the_gradient(zeros: str, kernels: bool, tmp_path: Any) -> None:
    """Without the library its function body runs, which holds no weight in floats ahead of time either."""
    weight = quantised(64, 64, zero_points=zeros)
    scale = numpy_helper.from_array(np.linspace(0.5, 1.5, 64, dtype=np.float32), "scale")
    nodes = [onnx.helper.make_node("Mul", ["x", "scale"], ["scaled"]), weight.node("scaled", "y")]
    info: tuple[Infos, Infos] = {"x": (np.float32, ["M", 64])}, {"y": (np.float32, ["M", 64])}
    model = model_of(nodes, *info, [*weight.initializers(), scale], 18)
    step = build_training_step(model, "mse", trainable=["scale"])
    operators = [node.op_type for node in step.model.graph.node]
    assert [operators.count(name) for name in ("MatmulNBitsBackward", "MatmulNBits", "MatMulNBits")] == [1, 1, 0]
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    if kernels:
        register(options)
    session = onnxruntime.InferenceSession(step.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(2)
    x, target = (rng.standard_normal((3, 64)).astype(np.float32) for _ in range(2))
    (found,) = session.run(["scale.grad"], {"x": x, "target": target, **step.parameters})

    def gradient(dtype: Any) -> Array:
        w, s = weight.weight.astype(dtype), step.parameters["scale"].astype(dtype)
        dy = (2 / x.size) * ((x.astype(dtype) * s) @ w.T - target.astype(dtype))
        return np.asarray(((dy.astype(dtype) @ w) * x.astype(dtype)).sum(0))

    terms = 64 * float(np.abs(gradient(np.float64)).max())
    assert_gradients_close(found, gradient(np.float32), gradient(np.float64), np.float32, terms=terms)
    largest = max(tensor.ByteSize() for tensor in onnx.load(tmp_path / "optimised.onnx").graph.initializer)
    assert largest < 64 * 64 * 0.6, "a byte or more a weight"


@pytest.mark.parametrize("level, name", [(0, "MatmulNBits"), (1, "MatmulNBits"), (4, "MatMulNBits")])
def test_products_of_whole_numbers_stay_onnxruntimes(level: int, name: str) -> None:
    weight = quantised(64, 64)
    node = weight.node("scaled", "y")
    node.attribute.append(onnx.helper.make_attribute("accuracy_level", level))
    scale = numpy_helper.from_array(np.ones(64, np.float32), "scale")
    nodes = [onnx.helper.make_node("Mul", ["x", "scale"], ["scaled"]), node]
    info: tuple[Infos, Infos] = {"x": (np.float32, ["M", 64])}, {"y": (np.float32, ["M", 64])}
    model = model_of(nodes, *info, [*weight.initializers(), scale], 18)
    step = build_training_step(model, "mse", trainable=["scale"], check=True)
    assert next(node.op_type for node in step.model.graph.node if "NBits" in node.op_type) == name
    plain = build_training_step(model, "mse", trainable=["scale"], fuse=False)
    assert not any(node.domain == "aclnn" for node in plain.model.graph.node)


def test_products_that_share_bytes_keep_scales_of_their_own() -> None:
    """An exporter or an optimizer may have merged equal tensors."""
    one, other = quantised(64, 64), quantised(64, 64, name="v", seed=1)
    shared = [one.node("scaled", "a"), other.node("scaled", "b")]
    shared[1].input[1] = shared[0].input[1]
    scale = numpy_helper.from_array(np.linspace(0.5, 1.5, 64, dtype=np.float32), "scale")
    nodes = [onnx.helper.make_node("Mul", ["x", "scale"], ["scaled"]), *shared]
    nodes.append(onnx.helper.make_node("Sub", ["a", "b"], ["y"]))
    info: tuple[Infos, Infos] = {"x": (np.float32, ["M", 64])}, {"y": (np.float32, ["M", 64])}
    model = model_of(nodes, *info, [*one.initializers(), other.initializers()[1], scale], 18)
    step = build_training_step(model, "mse", trainable=["scale"])
    rng = np.random.default_rng(4)
    x, target = (rng.standard_normal((3, 64)).astype(np.float32) for _ in range(2))
    found = run(step.model, {"x": x, "target": target, **step.parameters}, kernels=True)
    scales = (one.inputs["w_scales"].astype(float), other.inputs["v_scales"].astype(float))
    weight = one.weight - one.weight / np.repeat(scales[0], 16, 1) * np.repeat(scales[1], 16, 1)
    exact = np.mean(((x * step.parameters["scale"]).astype(float) @ weight.T - target) ** 2)
    assert abs(found["loss"] - exact) <= 64 * np.finfo(np.float32).eps * exact


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_operator_has_gradients_of_its_own(bits: int) -> None:
    """In a model that somebody wrote with it, of input and bias."""
    weight = quantised(5, 40, bits=bits, zero_points="packed")
    names = ["x", *(tensor.name for tensor in weight.initializers()), "b"]
    node = onnx.helper.make_node("MatmulNBits", names, ["y"], domain="aclnn", bits=bits)
    tensors = [*weight.initializers(), numpy_helper.from_array(np.arange(5, dtype=np.float32), "b")]
    model = model_of([node], {"x": (np.float32, ["M", 40])}, {"y": (np.float32, ["M", 5])}, tensors, 18)
    model.opset_import.append(onnx.helper.make_opsetid("aclnn", 1))
    rng = np.random.default_rng(3)
    x, v = rng.standard_normal((3, 40)).astype(np.float32), rng.standard_normal((3, 5)).astype(np.float32)
    found = run(differentiate(model, ["x", "b"], seeds={"y": "v"}), {"x": x, "v": v}, kernels=True)
    exact = v.astype(float) @ weight.weight
    native = v @ weight.weight.astype(np.float32)
    assert_gradients_close(found["x.grad"], native, exact, np.float32, terms=5 * np.abs(exact).max())
    assert_gradients_close(found["b.grad"], v.sum(0), v.astype(float).sum(0), np.float32, terms=3 * np.abs(v).max())


@pytest.mark.parametrize("fuse", [True, False])
def test_products_with_dequantised_weights_round_no_inputs(fuse: bool) -> None:
    """onnxruntime makes the two a MatMulNBits, whose accuracy level it takes from the options of the session."""
    text = (
        "g (float[N, 64] x) => (float[N, 5] y) { w = DequantizeLinear<axis = 1>(q, s) z = MatMul(x, w) y = Add(z, b) }"
    )
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 19]> {text}')
    rng = np.random.default_rng(2)
    x, q = rng.standard_normal((3, 64)).astype(np.float32), rng.integers(-127, 128, (64, 5), dtype=np.int8)
    scales, bias = rng.random(5).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    tensors: dict[str, Array] = {"q": q, "s": scales, "b": bias}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    session = TrainingSession(build_training_step(model, "mse", trainable=["b"], fuse=fuse))
    exact = x.astype(float) @ (q * scales.astype(float)) + bias
    native = x @ (q * scales) + bias
    loss = np.float32(session.step(x, np.zeros_like(native)))
    terms = 64 * np.abs(exact).max()
    assert_gradients_close(session.evaluate(x), native, exact, np.float32, terms=terms)
    assert_gradients_close(loss, np.mean(native**2), np.mean(exact**2), np.float32, terms=terms * np.abs(exact).max())
    by_bias = 2 * exact.sum(0) / exact.size
    native_by_bias = 2 * native.sum(0) / np.float32(exact.size)
    assert_gradients_close(session.gradients["b"], native_by_bias, by_bias, np.float32, terms=terms)
