"""Models of older opsets: outputs and gradients of the model as it was given, by onnxruntime on the older model."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch

from gradfuse import CheckError, TrainingSession, build_training_step, differentiate
from gradfuse.models import conversion, reading
from gradfuse.testing import assert_gradients_close

Array = npt.NDArray[Any]

pytestmark = pytest.mark.usefixtures("inference_in_process")


def resizing(opset: int, mode: str, scales: str, inputs: str = "") -> onnx.ModelProto:
    operator = "Resize" if opset > 9 else "Upsample"
    given = f'<mode = "{mode}", scales = [{scales}]> (x)' if opset < 9 else f'<mode = "{mode}"> (x, s)'
    numbers = "" if opset < 9 or inputs else f"<float[4] s = {{{scales}}}>"
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float[1,1,4,3] x{inputs}) => (float[1,1,H,W] y) {numbers} '
        f"{{ y = {operator} {given} }}"
    )


def outputs(model: onnx.ModelProto, names: list[str], **feeds: Array) -> list[Array]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(array) for array in session.run(names, feeds)]


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    ("opset", "scales", "computed"),
    [(opset, scales, False) for opset in (7, 8, 9, 10) for scales in ("1.0,1.0,2.0,3.0", "1.0,1.0,1.5,2.6")]
    + [(10, "1,1,0.6,0.5", False), (10, "1,1,2.6,0.4", False), (10, "1,1,2.6,0.4", True), (9, "1,1,3,1.5", True)],
)
def test_resizing_keeps_its_coordinates(opset: int, scales: str, computed: bool, mode: str) -> None:
    model = resizing(opset, mode, scales, ", float[4] s" if computed else "")
    feeds = {"s": np.array([float(number) for number in scales.split(",")], np.float32)} if computed else {}
    x = np.random.default_rng(0).standard_normal((1, 1, 4, 3)).astype(np.float32)
    (y,) = outputs(model, ["y"], x=x, **feeds)
    seed = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    # It is linear: the gradient is the seed times what becomes of unit vectors.
    rows = [outputs(model, ["y"], x=unit.reshape(x.shape), **feeds)[0] for unit in np.eye(x.size, dtype=np.float32)]
    exact = np.array([np.vdot(row.astype(np.float64), seed.astype(np.float64)) for row in rows]).reshape(x.shape)
    native = np.array([np.vdot(row, seed) for row in rows], np.float32).reshape(x.shape)
    result = differentiate(model, ["x"], seeds={"y": "seed"})
    found, gradient = outputs(result, ["y", "x.grad"], x=x, seed=seed, **feeds)
    np.testing.assert_array_equal(found, y)
    assert_gradients_close(gradient, native, exact, np.float32, terms=np.abs(seed).sum())


@pytest.mark.parametrize("given", [False, True])
def test_the_check_compares_with_the_model_as_it_was_given(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with what has become of it, of which all gradients are right."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 9]> g (float[N,1,4,4] x) => (float[N,1,12,12] y)
        <float[4] s = {1, 1, 3, 3}, float[1,1,1,1] w = {2}> { z = Mul(x, w) y = Upsample <mode = "linear"> (z, s) }"""
    )
    batch = {"x": np.ones((2, 1, 4, 4), np.float32), "target": np.zeros((2, 1, 12, 12), np.float32)}
    batch["x"][0, 0, 1] = 3
    build_training_step(model, "mse", trainable=["w"], check=batch if given else True)
    plain = conversion.raise_opset

    def other(ir_model: Any, opset: int) -> None:
        plain(ir_model, opset)
        for node in ir_model.graph:
            node.attributes.pop("coordinate_transformation_mode", None)

    monkeypatch.setattr(reading, "raise_opset", other)
    with pytest.raises(CheckError, match=re.escape("check: the output 'y' of what is differentiated is not that of")):
        build_training_step(model, "mse", trainable=["w"], check=batch if given else True)


@pytest.mark.parametrize("opset", range(18, 25))
@pytest.mark.parametrize("typed", [True, False])
def test_group_normalization_of_all_opsets(opset: int, typed: bool) -> None:
    """Until 20 scale and bias were of groups, and onnx's checker calls it deprecated; onnxruntime runs it.

    From 22 on onnx has no body for it, as operators of the body have gained types.
    """
    count = 4 if opset > 20 else 2
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": {opset}]>
        g (float[N,4,5] x, float[{count}] s, float[{count}] b) => (float[N,4,5] y) {"<float[N,4,5] h>" if typed else ""}
        {{ h = Mul(x, x)  y = GroupNormalization <num_groups = 2> (h, s, b) }}"""
    )
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((3, 4, 5)), "s": rng.standard_normal(count), "b": rng.standard_normal(count)}
    seed = rng.standard_normal((3, 4, 5))
    names = list(feeds)

    def by_torch(dtype: torch.dtype) -> list[Array]:
        leaves = {name: torch.tensor(array, dtype=dtype, requires_grad=True) for name, array in feeds.items()}
        scale, bias = (leaves[name].repeat_interleave(4 // count) for name in "sb")
        y = torch.nn.functional.group_norm(leaves["x"].square(), 2, scale, bias)
        y.backward(torch.tensor(seed, dtype=dtype))  # type: ignore[no-untyped-call]
        return [np.asarray(leaves[name].grad) for name in names]

    result = differentiate(model, names, seeds={"y": "seed"})
    given = {name: array.astype(np.float32) for name, array in {**feeds, "seed": seed}.items()}
    feeds = {name: given[name].astype(np.float64) for name in names}
    seed = given["seed"].astype(np.float64)
    found = outputs(result, [f"{name}.grad" for name in names], **given)
    for gradient, native, exact in zip(found, by_torch(torch.float32), by_torch(torch.float64), strict=True):
        assert_gradients_close(gradient, native, exact, np.float32, terms=np.abs(exact).max() * 16)


@pytest.mark.parametrize("asked", [True, False])
def test_statistics_of_every_position_are_no_parameters_and_follow_the_batch(asked: bool) -> None:
    """BatchNormalization's `spatial` = 0, of opsets 7 and 8."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 8]> g (float[N,3,4] x) => (float[N,3,4] y)
        { y = BatchNormalization <spatial = 0, momentum = 0.7> (x, s, b, m, v) }"""
    )
    rng = np.random.default_rng(0)
    stored = {name: rng.standard_normal((3, 4)).astype(np.float32) for name in "sbm"}
    stored["v"] = rng.uniform(0.5, 2, (3, 4)).astype(np.float32)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in stored.items())
    x, target = (rng.standard_normal((5, 3, 4)).astype(np.float32) for _ in range(2))

    def by_torch(dtype: torch.dtype) -> dict[str, Array]:
        s, b, m, v = (torch.tensor(array.reshape(-1), dtype=dtype) for array in stored.values())
        rows = torch.tensor(x, dtype=dtype).flatten(1)
        leaves = {"s": s.requires_grad_(), "b": b.requires_grad_()}
        y = torch.nn.functional.batch_norm(rows, m, v, weight=s, bias=b, training=asked, momentum=0.3)
        torch.nn.functional.mse_loss(y, torch.tensor(target, dtype=dtype).flatten(1)).backward()  # type: ignore[no-untyped-call]
        grads = {name: leaf.grad.numpy().reshape(3, 4) for name, leaf in leaves.items() if leaf.grad is not None}
        return grads | ({"m": m.numpy(), "v": v.numpy()} if asked else {})

    step = build_training_step(model, "mse", train_batch_norm=asked, check=True)
    assert (list(step.parameters), list(step.buffers)) == (["s", "b"], ["m", "v"] if asked else [])
    session = TrainingSession(step)
    session.step(x, target)
    found = {**session.gradients, **{name: session.state_dict()[name] for name in step.buffers}}
    native, exact = by_torch(torch.float32), by_torch(torch.float64)
    for name, wanted in exact.items():
        assert_gradients_close(found[name], native[name], wanted, np.float32, terms=5 * np.abs(wanted).max())
