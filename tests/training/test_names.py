"""Tensors of the user that have names which a step gives to its own: they keep them in both entrances."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
import torch
from torch import Tensor, nn

import gradfuse
from gradfuse import TrainingSession, TrainingStep, optimizers

OURS = ("dropout_seed", "growth_tracker", "learning_rate", "loss", "loss_scale", "micro_step", "step")


class Reserved(nn.Module):
    """Parameters of such names, a buffer that changes, one that does not, and an argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in OURS[1:]:
            self.register_parameter(name, nn.Parameter(torch.randn(3)))
        self.register_buffer("dropout_seed", torch.zeros(3))
        self.register_buffer("scaled_loss", torch.ones(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, target: Tensor) -> Tensor:
        tensors = vars(self)["_parameters"] | vars(self)["_buffers"]
        self.dropout_seed = tensors["dropout_seed"] + target.detach().mean(0)
        for name in OURS[1:]:
            target = torch.tanh(target * tensors[name])
        return self.dropout(target * tensors["scaled_loss"])  # type: ignore[no-any-return]


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
ZEROS = torch.zeros(4, 3)


def exported() -> TrainingStep:
    module = Reserved()
    return gradfuse.export_training_step(
        module,
        nn.MSELoss(),
        (X, ZEROS),
        torch.optim.AdamW(module.parameters(), lr=0.1),
        accumulate=2,
        grad_scaler=torch.amp.GradScaler("cpu", init_scale=4.0),
    )


NAMES = (*OURS, "target", "w", "w.grad", "w.updated", "w.exp_avg", "step.updated")


def chained(x: str, names: Sequence[str], last: str) -> onnx.ModelProto:
    """A model that multiplies by tensors of some names, which onnx's text format would not take."""
    values = [x, *(f"x{k}" for k in range(len(names)))]
    nodes = [onnx.helper.make_node("Mul", [values[k], name], [values[k + 1]]) for k, name in enumerate(names)]
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (float[N, 3] {x}) => (float[N, 3] y) '
        f"{{ r = Constant<value_float = 0.5>() t = Constant<value = bool {{1}}>() y = {last % values[-1]} }}"
    )
    nodes += model.graph.node
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def built() -> TrainingStep:
    model = chained("x", NAMES, "Dropout(%s, r, t)")
    rng = np.random.default_rng(0)
    for name in NAMES:
        array = rng.uniform(0.5, 1.5, 3).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return gradfuse.build_training_step(
        model,
        "mse",
        optimizer=optimizers.AdamW(lr=0.1),
        accumulate=2,
        grad_scaler=optimizers.GradScaler(init_scale=4.0),
    )


STEPS = {"exported": exported, "built": built}


@pytest.mark.parametrize("made", STEPS)
def test_a_step_trains_is_saved_and_resumed_with_names_that_are_its_own(made: str, tmp_path: Path) -> None:
    step = STEPS[made]()
    onnx.checker.check_model(step.model)
    users = {*NAMES} if made == "built" else {*OURS[1:]}
    assert step.parameters.keys() == users
    assert (step.input_names, step.target_names) == {
        "exported": (("target",), ("target_target",)),
        "built": (("x",), ("target_",)),
    }[made]
    assert not {*step.optimizer_state, *step.hyperparameters} & users
    assert step.own_name("loss") == "loss_" and step.own_name("learning_rate") == "learning_rate_"
    session = TrainingSession(step)
    assert session.learning_rate == pytest.approx(0.1)
    session.learning_rate = 0.05
    step.save(tmp_path / "step.onnx")
    other = TrainingSession(tmp_path / "step.onnx")
    other.learning_rate = 0.05
    for _ in range(3):
        assert session.step(X.numpy(), ZEROS.numpy()) == other.step(X.numpy(), ZEROS.numpy())
    session.save(tmp_path / "checkpoint.safetensors")
    resumed = TrainingSession(TrainingStep.load(tmp_path / "step.onnx"))
    resumed.load(tmp_path / "checkpoint.safetensors")
    assert resumed.learning_rate == pytest.approx(0.05)
    for _ in range(2):
        assert session.step(X.numpy(), ZEROS.numpy()) == resumed.step(X.numpy(), ZEROS.numpy())
    assert all((value == resumed.state_dict()[name]).all() for name, value in session.state_dict().items())
    assert np.isfinite(session.evaluate(X.numpy())).all()
    resumed.load_state_dict(session.state_dict())


def test_the_names_of_an_exported_state_dict_are_the_modules() -> None:
    session = TrainingSession(exported())
    module = Reserved()
    assert session.state_dict().keys() == module.state_dict().keys()
    module.eval()
    found = np.asarray(session.evaluate(X.numpy()))
    assert np.abs(found - module(X).detach().numpy()).max() <= 1e-6


def test_gradients_are_those_of_the_tensors_whose_names_are_taken() -> None:
    model = chained("x", ("w", "w.grad"), "Identity(%s)")
    arrays: dict[str, npt.NDArray[Any]] = {
        "w": np.array([1, 2, 3], np.float32),
        "w.grad": np.array([0.5, -1, 2], np.float32),
    }
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    step = gradfuse.build_training_step(model, gradfuse.losses.MSELoss(reduction="sum"))
    assert step.own_names == {"w.grad": "w.grad_"}
    session = TrainingSession(step)
    session.step(X.numpy(), ZEROS.numpy())
    leaves = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in arrays.items()}
    (X.double() * leaves["w"] * leaves["w.grad"]).square().sum().backward()  # type: ignore[no-untyped-call]
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        exact = leaf.grad.numpy()
        gradfuse.testing.assert_gradients_close(
            session.gradients[name], exact.astype(np.float32), exact, np.float32, terms=16 * np.abs(exact).max()
        )


@pytest.mark.parametrize("name", ["loss", "step", "learning_rate.1", "target", "w.grad", "w.updated", "w.exp_avg"])
def test_inputs_of_a_model_keep_such_names(name: str) -> None:
    model = chained(f'"{name}"', ("w",), "Tanh(%s)")
    model.graph.node[0].input[0] = name
    w = np.array([1, 2, 3], np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    step = gradfuse.build_training_step(model, "mse", optimizer=optimizers.AdamW(lr=0.1))
    assert step.input_names == (name,) and name not in step.target_names
    session = TrainingSession(step)
    parameter = torch.nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = (X * parameter).tanh().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert session.step(X.numpy(), ZEROS.numpy()) == pytest.approx(loss.item(), rel=1e-6)
    assert np.abs(session.evaluate(X.numpy()) - (X * parameter).tanh().detach().numpy()).max() < 1e-6


def test_a_name_that_checkpoints_cannot_have_is_refused_before_training(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] y)
        <float[2] p = {1, 2}> { y = Mul(x, p) }"""
    )
    model.graph.initializer[0].name = model.graph.node[0].input[1] = "__metadata__"
    step = gradfuse.build_training_step(model, "mse", trainable=["__metadata__"])
    wanted = "a tensor has the name '__metadata__', which safetensors files reserve; expected another"
    with pytest.raises(gradfuse.ModelError, match=wanted):
        TrainingSession(step)
    with pytest.raises(gradfuse.ModelError, match=wanted):
        step.save(tmp_path / "step.onnx", defaults=False)
    assert not list(tmp_path.iterdir())
