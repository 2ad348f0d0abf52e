"""Names of gradients that are taken, and derivatives of derivatives."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from node_tests import run
from torch import Tensor

from gradfuse import TrainingSession, build_training_step, differentiate
from gradfuse.optimizers import SGD
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

HEAD = '<ir_version: 10, opset_import: ["": 18]> '
NETWORK = HEAD + (
    "g (float[4, 3] x) => (float y) <float[3, 2] w = {1, -2, 3, 0.5, -1, 2}, float[2] b = {0.1, -0.2}> "
    "{ a = MatMul(x, w) c = Add(a, b) d = Tanh(c) e = Softmax(d) f = Mul(e, d) y = ReduceSum<keepdims = 0>(f) }"
)


def by_torch(x: Tensor, w: Tensor) -> Tensor:
    d = (x @ w + torch.tensor([0.1, -0.2], dtype=x.dtype)).tanh()
    return (d.softmax(-1) * d).sum()


def test_the_derivative_of_a_derivative_is_torchs() -> None:
    """A product with the matrix of second derivatives, and one with the third."""
    first = differentiate(onnx.parser.parse_model(NETWORK), ["x", "w"])
    second = differentiate(first, ["x", "w"], seeds={"x.grad": "v"})
    third = differentiate(second, ["x"], seeds={"w.grad_2": "u"})
    onnx.checker.check_model(third, full_check=True)
    assert [o.name for o in third.graph.output] == ["y", "x.grad", "w.grad", "x.grad_2", "w.grad_2", "x.grad_3"]
    assert [p.value for p in third.metadata_props if p.key == "gradfuse.gradients"] == [json.dumps({"x": "x.grad_3"})]
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("x", (4, 3)), ("v", (4, 3)))}
    feeds["u"] = rng.standard_normal((3, 2)).astype(np.float32)
    found = run(third, feeds, by_onnx=False)

    def gradients(dtype: torch.dtype) -> dict[str, Any]:
        x, v, u = (torch.tensor(feeds[name], dtype=dtype) for name in "xvu")
        w = torch.tensor([[1, -2], [3, 0.5], [-1, 2]], dtype=dtype, requires_grad=True)
        x.requires_grad_()
        dx, dw = torch.autograd.grad(by_torch(x, w), (x, w), create_graph=True)
        dx2, dw2 = torch.autograd.grad((dx * v).sum(), (x, w), create_graph=True)
        (dx3,) = torch.autograd.grad((dw2 * u).sum(), x)
        names = ("x.grad", "w.grad", "x.grad_2", "w.grad_2", "x.grad_3")
        return {name: one.detach().numpy() for name, one in zip(names, (dx, dw, dx2, dw2, dx3), strict=True)}

    native, exact = gradients(torch.float32), gradients(torch.float64)
    for name, gradient in exact.items():
        terms = 64 * np.abs(gradient).max()
        assert_gradients_close(found[name], native[name], gradient, np.float32, terms=terms)


def test_a_name_that_the_model_has_stays_its_own() -> None:
    """Inside a branch too."""
    branches = (
        "If(c)<then_branch = t () => (float[3] p) { q = Mul(x, x) p = Identity(q) }, "
        "else_branch = e () => (float[3] r) { r = Identity(x) }>"
    )
    model = onnx.parser.parse_model(
        HEAD + f"g (float[3] x, bool c) => (float y) {{ z = {branches} y = ReduceSum<keepdims = 0>(z) }}"
    )
    branch = model.graph.node[0].attribute[0].g
    branch.node[0].output[0] = branch.node[1].input[0] = "x.grad"
    result = differentiate(model, ["x"])
    onnx.checker.check_model(result, full_check=True)
    assert [o.name for o in result.graph.output] == ["y", "x.grad_2"]
    x = np.array([1, -2, 3], np.float32)
    assert (run(result, {"x": x, "c": np.array(True)}, by_onnx=False)["x.grad_2"] == 2 * x).all()


ENERGY = HEAD + (
    "g (float[n, 3] x) => (float e) <float[3, 2] w = {0.3, -0.2, 0.5, 0.1, -0.4, 0.6}, float[2] b = {0.1, -0.2}> "
    "{ a = MatMul(x, w) c = Add(a, b) d = Tanh(c) e = ReduceSum<keepdims = 0>(d) }"
)
LOSS = HEAD + (
    "l (float e, float[n, 3] dx, float energy, float[n, 3] force) => (float y) "
    "{ a = Sub(e, energy) b = Mul(a, a) s = Add(dx, force) q = Mul(s, s) r = ReduceMean<keepdims = 0>(q) "
    "y = Add(b, r) }"
)


@pytest.mark.parametrize("fuse", (True, False))
def test_a_loss_of_a_gradient_trains_as_in_torch(fuse: bool) -> None:
    loss = onnx.parser.parse_model(LOSS)
    loss.graph.input[1].name = loss.graph.node[2].input[0] = "x.grad"
    step = build_training_step(
        differentiate(onnx.parser.parse_model(ENERGY), ["x"]), loss, optimizer=SGD(lr=0.01), fuse=fuse
    )
    session = TrainingSession(step)
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((4 + k, 3)), rng.standard_normal((4 + k, 3))) for k in range(3)]

    def trained(dtype: torch.dtype) -> dict[str, Any]:
        values = {name: torch.tensor(np.array(one), dtype=dtype) for name, one in step.parameters.items()}
        for given in batches:
            x, force = (torch.tensor(one.astype(np.float32)).to(dtype) for one in given)
            w, b = (values[name].requires_grad_() for name in ("w", "b"))
            x.requires_grad_()
            energy = (x @ w + b).tanh().sum()
            (dx,) = torch.autograd.grad(energy, x, create_graph=True)
            gradients = torch.autograd.grad((energy - 0.5) ** 2 + (dx + force).square().mean(), (w, b))
            values = {name: (values[name] - 0.01 * one).detach() for name, one in zip("wb", gradients, strict=True)}
        return {name: one.numpy() for name, one in values.items()}

    for x, force in batches:
        session.step(x.astype(np.float32), {"energy": np.float32(0.5), "force": force.astype(np.float32)})
    native, exact = trained(torch.float32), trained(torch.float64)
    for name, truth in exact.items():
        terms = 64 * np.abs(truth).max()
        assert_gradients_close(session.state_dict()[name], native[name], truth, np.float32, terms=terms)
    _, gradient = session.evaluate(batches[0][0].astype(np.float32))
    assert gradient.shape == (4, 3)
