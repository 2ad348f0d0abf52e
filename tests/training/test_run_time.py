"""What changes at run time: hyperparameters between updates, and the values of weights that do not train."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from long_tests import mostly_long
from torch import nn, optim
from training.models import Batch, MakeOptimizer, Mlp, assert_trained, batches, groups

import gradfuse
from gradfuse import ArgumentError, GradfuseError, TrainingSession, TrainingStep, export_training_step, optimizers

SCHEDULES: dict[str, list[Any]] = {
    "weight_decay": [0.1, 0.3, 0.0, 0.2, 0.5, 0.05],
    "betas": [(0.9, 0.95), (0.9, 0.99), (0.45, 0.999), (0.0, 0.9), (0.8, 0.999), (0.85, 0.9712345678)],
    "eps": [1e-8, 1e-3, 1e-6, 0.1, 1e-8, 1e-5],
    "momentum": [0.9, 0.0, 0.5, 0.99, 0.0, 0.7],
    "alpha": [0.99, 0.9, 0.5, 0.8, 0.9, 0.99],
    "rho": [0.9, 0.8, 0.95, 0.5, 0.9, 0.9],
    "max_grad_norm": [0.3, 10.0, 0.05, float("inf"), 0.2, 1.0],
}
UPDATES = 8
OPERATORS = ("ApplyAdamW", "ApplySgd")


def at(name: str, update: int) -> Any:
    return SCHEDULES[name][update % len(SCHEDULES[name])]


def in_torch(
    module: nn.Module, make: Any, data: list[Batch], dtype: torch.dtype, names: tuple[str, ...], accumulate: int = 1
) -> nn.Module:
    """Train a copy of a module in PyTorch, with options that are set between updates."""
    module = copy.deepcopy(module).to(dtype)
    made = make(module)
    every = made if isinstance(made, (list, tuple)) else [made]
    for index, (x, y) in enumerate(data):
        (F.cross_entropy(module(x.to(dtype)), y) / accumulate).backward()  # type: ignore[no-untyped-call]
        update, rest = divmod(index, accumulate)
        if rest < accumulate - 1:
            continue
        for group in (group for one in every for group in one.param_groups):
            group.update({name: at(name, update) for name in names if name in group})
        if "max_grad_norm" in names:
            nn.utils.clip_grad_norm_(module.parameters(), at("max_grad_norm", update))
        for one in every:
            one.step()
            one.zero_grad()
    return module


def in_session(
    step: TrainingStep, data: list[Batch], names: tuple[str, ...], folder: Path, accumulate: int = 1
) -> TrainingSession:
    """Train the same in a session, which another one takes up in the middle from a file."""
    session = TrainingSession(step)
    for index, batch in enumerate(data):
        for name in names:
            setattr(session, name, at(name, index // accumulate))
        if index == len(data) // 2:
            session.save(folder / "state.safetensors")
            before = {name: getattr(session, name) for name in names}
            session = TrainingSession(step)
            session.load(folder / "state.safetensors")
            assert {name: getattr(session, name) for name in names} == before
        session.step(*batch)
    return session


def updates(graph: onnx.GraphProto) -> int:
    inner = sum(updates(attribute.g) for node in graph.node for attribute in node.attribute)
    return sum(node.op_type in OPERATORS for node in graph.node) + inner


OPTIMIZERS: dict[str, tuple[MakeOptimizer, tuple[str, ...], bool]] = {
    "adamw_decay": (lambda m: optim.AdamW(groups(m), lr=0.02), ("weight_decay",), True),
    "adamw": (lambda m: optim.AdamW(groups(m), lr=0.02), ("weight_decay", "betas", "eps", "max_grad_norm"), False),
    "adam_decay": (lambda m: optim.Adam(m.parameters(), lr=0.02), ("weight_decay", "max_grad_norm"), True),
    "adam_amsgrad": (lambda m: optim.Adam(m.parameters(), lr=0.02, amsgrad=True), ("weight_decay", "betas"), False),
    "sgd_decay": (lambda m: optim.SGD(m.parameters(), lr=0.1, maximize=True), ("weight_decay",), True),
    "sgd_norm": (lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9), ("max_grad_norm",), True),
    "sgd_from_0": (lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.0), ("momentum", "weight_decay"), False),
    "sgd_nesterov": (lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True), ("momentum",), False),
    "rmsprop": (
        lambda m: optim.RMSprop(m.parameters(), lr=0.02, momentum=0.5, centered=True),
        ("weight_decay", "momentum", "alpha", "eps"),
        False,
    ),
    "adagrad": (lambda m: optim.Adagrad(m.parameters(), lr=0.02, lr_decay=0.1), ("weight_decay", "eps"), False),
    "adadelta": (lambda m: optim.Adadelta(m.parameters(), lr=0.5), ("weight_decay", "rho", "eps"), False),
    "adamax": (lambda m: optim.Adamax(m.parameters(), lr=0.02), ("weight_decay", "betas", "eps"), False),
    "nadam": (lambda m: optim.NAdam(groups(m), lr=0.02), ("weight_decay", "betas", "eps"), False),
    "radam": (lambda m: optim.RAdam(m.parameters(), lr=0.02), ("weight_decay", "betas"), False),
    "muon": (
        lambda m: optim.Muon([p for p in m.parameters() if p.dim() > 1], lr=0.02),
        ("weight_decay", "momentum"),
        False,
    ),
}
QUICK = ("adamw_decay", "sgd_from_0")


@pytest.mark.parametrize("name", mostly_long(OPTIMIZERS, QUICK))
@pytest.mark.parametrize("fuse, accumulate", [(True, 1), pytest.param(False, 2, marks=pytest.mark.long)])
def test_options_that_change_between_updates_are_those_of_torch(
    name: str, fuse: bool, accumulate: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module, data = Mlp(), batches(UPDATES * accumulate, 3)
    make, names, is_fused = OPTIMIZERS[name]
    step = export_training_step(
        module,
        F.cross_entropy,
        data[0],
        make(module),
        run_time=names,
        fuse=fuse,
        evaluation=False,
        accumulate=accumulate,
        max_grad_norm=0.7 if "max_grad_norm" in names else None,
    )
    assert updates(step.model.graph) == (4 if fuse and is_fused else 0)
    session = in_session(step, data, names, tmp_path, accumulate)
    native, exact = (in_torch(module, make, data, dtype, names, accumulate) for dtype in (torch.float32, torch.float64))
    assert_trained(session.state_dict(), native, exact, UPDATES)
    fixed = in_torch(module, make, data, torch.float32, (), accumulate)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(native.parameters(), fixed.parameters(), strict=True))


OF_ONNX: dict[str, tuple[optimizers.OptimizerOptions, MakeOptimizer, tuple[str, ...]]] = {
    "adamw": (
        optimizers.AdamW(lr=0.02),
        lambda m: optim.AdamW(m.parameters(), lr=0.02),
        ("weight_decay", "betas", "eps", "max_grad_norm"),
    ),
    "sgd": (
        optimizers.SGD(lr=0.1, momentum=0.9),
        lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        ("momentum", "weight_decay"),
    ),
    "sgd_decay": (
        optimizers.SGD(lr=0.1, momentum=0.9),
        lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        ("weight_decay",),
    ),
    "rmsprop": (
        optimizers.RMSprop(lr=0.02, momentum=0.5),
        lambda m: optim.RMSprop(m.parameters(), lr=0.02, momentum=0.5),
        ("alpha", "eps", "momentum", "weight_decay"),
    ),
    "adadelta": (optimizers.Adadelta(), lambda m: optim.Adadelta(m.parameters()), ("rho", "weight_decay")),
    "adamax": (optimizers.Adamax(), lambda m: optim.Adamax(m.parameters()), ("betas", "weight_decay")),
}


def in_onnx(module: Mlp) -> onnx.ModelProto:
    node, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    nodes = [
        node("Gemm", ["x", "first.weight", "first.bias"], ["hidden"], transB=1),
        node("Tanh", ["hidden"], ["active"]),
        node("Gemm", ["active", "last.weight", "last.bias"], ["y"], transB=1),
    ]
    x, y = (value(name, onnx.TensorProto.FLOAT, ["N", size]) for name, size in (("x", 4), ("y", 3)))
    stored = [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in module.state_dict().items()]
    graph = onnx.helper.make_graph(nodes, "mlp", [x], [y], stored)
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 18)])


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", OF_ONNX)
def test_steps_of_onnx_models_take_them_as_well(name: str, fuse: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, data = Mlp(), batches(UPDATES, 3)
    optimizer, make, names = OF_ONNX[name]
    norm = 0.7 if "max_grad_norm" in names else None
    step = gradfuse.build_training_step(
        in_onnx(module), "cross_entropy", optimizer=optimizer, run_time=names, max_grad_norm=norm, fuse=fuse
    )
    onnx.checker.check_model(step.model, full_check=True)
    step.save(tmp_path / "step.onnx")
    session = in_session(TrainingStep.load(tmp_path / "step.onnx"), data, names, tmp_path)
    native, exact = (in_torch(module, make, data, dtype, names) for dtype in (torch.float32, torch.float64))
    assert_trained(session.state_dict(), native, exact, UPDATES)


def test_a_file_that_is_fused_later_keeps_what_changes(tmp_path: Path) -> None:
    """`fuse` must not take an input for the number that it begins at."""
    torch.manual_seed(0)
    module, data = Mlp(), batches(UPDATES, 3)
    optimizer, make, names = OF_ONNX["adamw"]
    for asked in (names, ("weight_decay",)):
        norm = 0.7 if "max_grad_norm" in asked else None
        step = gradfuse.build_training_step(
            in_onnx(module), "cross_entropy", optimizer=optimizer, run_time=asked, fuse=False, max_grad_norm=norm
        )
        step.save(tmp_path / "step.onnx")
        fused = gradfuse.fuse(tmp_path / "step.onnx")
        onnx.save(fused.model, tmp_path / "fused.onnx")
        session = in_session(TrainingStep.load(tmp_path / "fused.onnx"), data, asked, tmp_path)
        native, exact = (in_torch(module, make, data, dtype, asked) for dtype in (torch.float32, torch.float64))
        assert_trained(session.state_dict(), native, exact, UPDATES)


def test_scaled_gradients_are_decayed_unscaled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, data = Mlp(), batches(UPDATES, 3)
    names = ("weight_decay", "max_grad_norm")
    for optimizer, make in (
        (optimizers.SGD(lr=0.1, momentum=0.9), lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
        (optimizers.AdamW(lr=0.02), lambda m: optim.AdamW(m.parameters(), lr=0.02)),
    ):
        step = gradfuse.build_training_step(
            in_onnx(module),
            "cross_entropy",
            optimizer=optimizer,
            run_time=names,
            max_grad_norm=0.7,
            grad_scaler=optimizers.GradScaler(init_scale=256.0),
        )
        assert updates(step.model.graph) == 4
        session = in_session(step, data, names, tmp_path)
        native, exact = (in_torch(module, make, data, dtype, names) for dtype in (torch.float32, torch.float64))
        assert_trained(session.state_dict(), native, exact, UPDATES)


def test_parameters_of_16_bits_are_decayed_in_float32() -> None:
    module = Mlp()
    model = gradfuse.build_training_step(
        in_float16(in_onnx(module)), "cross_entropy", optimizer=optimizers.AdamW(lr=0.01), run_time=["weight_decay"]
    )
    fixed = gradfuse.build_training_step(
        in_float16(in_onnx(module)), "cross_entropy", optimizer=optimizers.AdamW(lr=0.01, weight_decay=0.3)
    )
    one, other = TrainingSession(model), TrainingSession(fixed)
    one.weight_decay = 0.3
    for x, y in batches(4, 3):
        one.step(x.half(), y)
        other.step(x.half(), y)
    wanted = other.state_dict()
    for name, array in one.state_dict().items():
        assert abs(array.astype(np.float64) - wanted[name]).max() <= np.finfo(np.float16).eps * abs(wanted[name]).max()


def in_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        )
    return model


def small(**options: Any) -> TrainingStep:
    options = {"optimizer": optimizers.AdamW(lr=0.02)} | options
    return gradfuse.build_training_step(in_onnx(Mlp()), "cross_entropy", **options)


def test_values_that_torch_refuses_are_refused_and_change_nothing() -> None:
    step = small(run_time=["weight_decay", "betas", "eps", "max_grad_norm"], max_grad_norm=1.0)
    session = TrainingSession(step)
    session.betas = (0.5, 0.75)
    for name, value, message in (
        ("betas", 0.5, r"betas is 0\.5; expected two numbers"),
        ("betas", (0.9, 1.0), r"betas is \(0\.9, 1\.0\); expected numbers from 0 to below 1"),
        ("betas", (0.9, float("nan")), "expected numbers from 0 to below 1"),
        ("betas", None, "betas is None; expected two numbers"),
        ("weight_decay", -0.1, r"weight_decay is -0\.1; expected finite numbers from 0 on"),
        ("weight_decay", float("nan"), "weight_decay is nan; expected finite numbers from 0 on"),
        ("weight_decay", (0.1, 0.2), "expected a number"),
        ("eps", float("inf"), "eps is inf; expected finite numbers from 0 on"),
        ("max_grad_norm", 0, "max_grad_norm is 0; expected positive numbers"),
        ("max_grad_norm", float("nan"), "max_grad_norm is nan; expected positive numbers"),
        ("max_grad_norm", "1", "max_grad_norm is '1'; expected a number"),
    ):
        with pytest.raises(ArgumentError, match=message):
            setattr(session, name, value)
    assert session.betas == (0.5, 0.75)
    assert (session.weight_decay, session.eps, session.max_grad_norm) == (0.01, 1e-8, 1.0)
    with pytest.raises(GradfuseError, match="the step has no such input; expected a step with 'momentum' in run_time"):
        session.momentum = 0.5
    with pytest.raises(GradfuseError, match="the step has no such input; expected a step with 'rho' in run_time"):
        _ = session.rho
    with pytest.raises(AttributeError, match="no attribute 'weight_decoy'; expected 'learning_rate', 'weight_decay'"):
        session.weight_decoy = 0.5


def test_a_checkpoint_with_values_out_of_range_is_refused(tmp_path: Path) -> None:
    import safetensors.numpy

    session = TrainingSession(small(run_time=["betas"]))
    session.save(tmp_path / "state.safetensors")
    tensors = safetensors.numpy.load_file(tmp_path / "state.safetensors")
    safetensors.numpy.save_file(tensors | {"betas": np.array([0.9, 1.5])}, tmp_path / "state.safetensors")
    with pytest.raises(GradfuseError, match=r"'betas' is \[0\.9 1\.5\]; expected numbers from 0 to below 1"):
        session.load(tmp_path / "state.safetensors")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"run_time": "betas"}, "run_time is 'betas'; expected a list of names"),
        ({"run_time": ["lr"]}, "run_time has 'lr', which always is one; expected names among 'weight_decay', 'betas'"),
        ({"run_time": [3]}, "run_time has 3; expected names among"),
        ({"run_time": ["momentum"]}, "'momentum', which Adam does not have; expected names among 'betas', 'eps'"),
        ({"run_time": ["max_grad_norm"]}, "max_grad_norm is None; expected the norm to begin with"),
        ({"run_time": ["betas"], "float64": False, "fuse": False}, "'betas', whose powers need float64"),
        ({"run_time": ["eps"], "optimizer": None}, "run_time is given without an optimizer"),
        (
            {"run_time": ["momentum"], "optimizer": optimizers.SGD(lr=0.1, momentum=0.9, dampening=0.5)},
            "run_time has 'momentum', and dampening is not 0",
        ),
    ],
)
def test_what_cannot_be_an_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        small(**options)


class Named(nn.Module):
    """Parameters have the names that the step needs."""

    def __init__(self) -> None:
        super().__init__()
        self.betas = nn.ParameterList([nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))])
        self.weight_decay = nn.Parameter(torch.ones(()))
        self.learning_rate = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.betas[0] + self.betas[1]) * self.weight_decay * self.learning_rate  # type: ignore[no-any-return]


def test_parameters_may_have_the_names_of_hyperparameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, data = Named(), batches(UPDATES, 3)

    def make(module: nn.Module) -> optim.Optimizer:
        every = list(module.parameters())
        given: list[dict[str, Any]] = [{"params": every[:2]}, {"params": every[2:], "lr": 0.01}]
        return optim.AdamW(given, lr=0.02)

    names = ("weight_decay", "betas")
    step = export_training_step(module, F.cross_entropy, data[0], make(module), run_time=names, evaluation=False)
    step.save(tmp_path / "step.onnx")
    session = in_session(TrainingStep.load(tmp_path / "step.onnx"), data, names, tmp_path)
    assert session.learning_rate == pytest.approx((0.02, 0.01))
    native, exact = (in_torch(module, make, data, dtype, names) for dtype in (torch.float32, torch.float64))
    assert_trained(session.state_dict(), native, exact, UPDATES)


def test_sessions_that_share_parameters_have_their_own() -> None:
    step = small(run_time=["weight_decay"])
    first = TrainingSession(step)
    second = TrainingSession(step, share_with=first)
    second.weight_decay = 0.5
    assert (first.weight_decay, second.weight_decay) == (0.01, 0.5)
