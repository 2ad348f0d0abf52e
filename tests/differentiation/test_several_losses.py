"""Losses of several outputs, outputs of a step, gradients of inputs, and inputs that train, from ONNX models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradfuse import ArgumentError, TrainingSession, build_training_step, losses, optimizers
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

UPDATES, RATE = 4, 0.1
GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = {
    name: torch.randn(shape, generator=GENERATOR) for name, shape in {"w": (2, 5), "c": (5, 3), "b": (5, 4)}.items()
}
X, Z = torch.randn(6, 2, generator=GENERATOR), torch.randn(1, 2, generator=GENERATOR)
CLASSES, BOXES = torch.tensor([0, 2, 1, 1, 2, 0]), torch.randn(6, 4, generator=GENERATOR)


def model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 18]>
        g (float[N, 2] x, float[M, 2] z) => (float[N, 3] kind, float[N, 4] box) {
            step = Add(x, z)
            h = MatMul(step, w)
            hidden = Tanh(h)
            kind = MatMul(hidden, c)
            box = MatMul(hidden, b)
        }
    """)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(t.numpy(), name) for name, t in WEIGHTS.items())
    return proto


def of_torch(dtype: torch.dtype, weight: float, train_z: bool) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """What a training in PyTorch gives in each step, and what it trains, at its end."""
    trained = {name: one.to(dtype).clone().requires_grad_() for name, one in WEIGHTS.items()}
    x, z = (one.to(dtype).clone().requires_grad_() for one in (X, Z))
    trained |= {"z": z} if train_z else {}
    optimizer = torch.optim.SGD(trained.values(), lr=RATE)
    results: list[dict[str, Tensor]] = []
    for _ in range(UPDATES):
        hidden = torch.tanh((x + z) @ trained["w"])
        of_kind = F.cross_entropy(hidden @ trained["c"], CLASSES)
        of_box = F.smooth_l1_loss(hidden @ trained["b"], BOXES.to(dtype))
        loss = of_kind + weight * of_box
        optimizer.zero_grad()
        x.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        results.append(
            {"loss": loss, "kind.loss": of_kind, "box.loss": of_box, "hidden": hidden, "x.grad": x.grad.clone()}
        )
        optimizer.step()
    return [{name: one.detach() for name, one in step.items()} for step in results], trained


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("train_z", [True, False])
def test_several_losses_are_those_of_torch(fuse: bool, train_z: bool, tmp_path: Path) -> None:
    step = build_training_step(
        model(),
        {"kind": "cross_entropy", "box": losses.HuberLoss()},
        loss_weights={"box": 0.25},
        outputs=["hidden", "kind"],
        input_gradients=["x"],
        train_inputs={"z": Z.numpy()} if train_z else None,
        optimizer=optimizers.SGD(lr=RATE),
        fuse=fuse,
    )
    assert step.output_names == ("hidden", "kind", "kind.loss", "box.loss", "x.grad")
    assert step.target_names == ("kind.target", "box.target")
    step.save(tmp_path / "step.onnx")
    session = TrainingSession(tmp_path / "step.onnx")
    natives, exacts = (of_torch(dtype, 0.25, train_z) for dtype in (torch.float32, torch.float64))
    inputs: Any = X if train_z else (X, Z)
    for native, exact in zip(natives[0], exacts[0], strict=True):
        loss = session.step(inputs, {"box": BOXES, "kind": CLASSES})
        actual: dict[str, Any] = {"loss": np.float32(loss), **session.outputs}
        assert actual["kind"].shape == (6, 3)
        for name in native:
            terms = UPDATES * max(1.0, float(exact[name].abs().max()))
            assert_gradients_close(actual[name], native[name], exact[name], np.float32, terms=terms)
    state = session.state_dict()
    assert set(state) == set(natives[1])
    for name, array in state.items():
        assert_gradients_close(array, natives[1][name], exacts[1][name], np.float32, terms=UPDATES)
    # The evaluation model gives what the model gives.
    assert [array.shape for array in session.evaluate(inputs)] == [(6, 3), (6, 4)]


def test_an_input_may_train_alone() -> None:
    """As a latent code that is looked for, or the embeddings of a prompt."""
    step = build_training_step(
        model(), ["cross_entropy"], trainable=[], train_inputs={"z": Z.numpy()}, optimizer=optimizers.Adam(lr=0.1)
    )
    session = TrainingSession(step)
    first, *_, last = (session.step(X, CLASSES) for _ in range(20))
    assert last < first
    assert list(session.state_dict()) == ["z"]


def test_a_list_is_of_the_outputs_in_order_and_the_losses_check_their_labels() -> None:
    session = TrainingSession(build_training_step(model(), [losses.CrossEntropyLoss(label_smoothing=0.1), "mse"]))
    loss = session.step((X, Z), (CLASSES, BOXES))
    hidden = torch.tanh((X + Z) @ WEIGHTS["w"])
    wanted = F.cross_entropy(hidden @ WEIGHTS["c"], CLASSES, label_smoothing=0.1)
    assert loss == pytest.approx(float(wanted + F.mse_loss(hidden @ WEIGHTS["b"], BOXES)))
    with pytest.raises(ArgumentError, match=r"'kind\.target'\[0\] is 3"):
        session.step((X, Z), (torch.full((6,), 3), BOXES))


def test_outputs_of_one_loss_and_of_the_models_own() -> None:
    proto = model()
    del proto.graph.output[1]
    session = TrainingSession(build_training_step(proto, "cross_entropy", outputs=["kind"]))
    loss = session.step((X, Z), CLASSES)
    assert loss == pytest.approx(float(F.cross_entropy(torch.tensor(session.outputs["kind"]), CLASSES)))
    total = onnx.parser.parse_graph("g (float[N, 3] kind) => (float total) { total = ReduceMean<keepdims = 0>(kind) }")
    proto.graph.node.extend(total.node)
    proto.graph.output[0].CopyFrom(total.output[0])
    session = TrainingSession(build_training_step(proto, None, outputs=["total", "kind"]))
    loss = session.step((X, Z))
    assert loss == session.outputs["total"] == pytest.approx(session.outputs["kind"].mean())


MISUSE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an unknown output": ({"boxes": "mse"}, {}, "loss has 'boxes'; expected float outputs among 'kind', 'box'"),
    "no losses": ({}, {}, "loss is empty; expected at least one loss"),
    "too many losses": (["mse"] * 3, {}, "loss has 3 losses, and the model 2 float outputs"),
    "a model among losses": ({"box": model()}, {}, "loss has ModelProto for 'box'; expected a name or an object"),
    "weights of one loss": ("mse", {"loss_weights": {"box": 2.0}}, "loss_weights is given with one loss"),
    "a weight of nothing": (
        {"box": "mse"},
        {"loss_weights": {"kind": 2.0}},
        "loss_weights has 'kind'; expected outputs among 'box'",
    ),
    "a weight that is no number": ({"box": "mse"}, {"loss_weights": {"box": "2"}}, "loss_weights of 'box' is '2'"),
    "unknown values": ("mse", {"outputs": ["y", "u"]}, "outputs has 'y', 'u'; expected values that the model computes"),
    "a name of the optimizer": (
        "mse",
        {"outputs": ["step"], "optimizer": optimizers.Adam()},
        "outputs has 'step', a name that the step has; expected another one",
    ),
    "text": ("mse", {"outputs": "kind"}, "outputs is 'kind'; expected a list of names"),
    "unknown inputs": (
        "mse",
        {"input_gradients": ["y", "x", "u"]},
        "input_gradients has 'y', 'u'; expected inputs among 'x', 'z'",
    ),
    "scaled": (
        "mse",
        {"input_gradients": ["x"], "optimizer": optimizers.SGD(lr=1), "grad_scaler": optimizers.GradScaler()},
        "input_gradients are given with grad_scaler, which scales them; expected one of the two",
    ),
    "no input": ("mse", {"train_inputs": {"y": Z.numpy()}}, "train_inputs has 'y'; expected inputs among 'x', 'z'"),
    "another shape": (
        "mse",
        {"train_inputs": {"z": np.zeros(2, np.float32)}},
        "train_inputs of 'z' is float32 of shape [2]; expected FLOAT of shape [M,2]",
    ),
}


def test_inputs_without_a_derivative_have_no_gradient() -> None:
    rounded = model()
    rounded.graph.node[0].input[1] = "rounded"
    rounded.graph.node.insert(0, onnx.helper.make_node("Round", ["z"], ["rounded"]))
    with pytest.raises(ArgumentError, match="the loss does not depend on the input 'z'; expected that it does"):
        build_training_step(rounded, "mse", input_gradients=["x", "z"])


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_one_clear_line(name: str) -> None:
    loss, options, text = MISUSE[name]
    with pytest.raises(ArgumentError) as caught:
        build_training_step(model(), loss, **options)
    assert str(caught.value).startswith("build_training_step: ")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
