"""The update inside an exported step is that of torch.optim, in many steps and for all options."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypedDict

import mpmath
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from long_tests import mostly_long
from torch import Tensor, nn
from training.models import SHAPES, Batch, MakeOptimizer, Mlp, Whole, assert_trained, batches, groups, train

import gradfuse
from gradfuse import ExportError, TrainingSession, TrainingStep, export_training_step
from gradfuse.testing import assert_gradients_close
from gradfuse.training import rules
from gradfuse.training.nodes import Nodes

STEPS = 100
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
VARIANTS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1, weight_decay=0.01),
    "sgd_momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "sgd_nesterov": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.8, nesterov=True),
    "sgd_maximize": lambda m: SGD(m.parameters(), lr=0.001, momentum=0.9, maximize=True),
    "adam": lambda m: ADAM(m.parameters(), lr=0.01),
    "adam_decay": lambda m: ADAM(m.parameters(), lr=0.01, weight_decay=0.1, betas=(0.4, 0.9), eps=1e-3),
    "adam_amsgrad": lambda m: ADAM(m.parameters(), lr=0.01, amsgrad=True, betas=(0.9, 0.6)),
    "adamw": lambda m: ADAMW(m.parameters(), lr=0.01, weight_decay=0.2),
    "adamw_maximize": lambda m: ADAMW(m.parameters(), lr=0.001, amsgrad=True, maximize=True),
    "adamw_maximize_fused": lambda m: ADAMW(m.parameters(), lr=0.001, maximize=True),
    "adamw_groups": lambda m: ADAMW(groups(m), lr=0.01),
}


def updates(graph: onnx.GraphProto) -> int:
    """The number of parameters that an operator updates, in branches too."""
    found = 0
    for node in graph.node:
        found += node.op_type in ("ApplyAdamW", "ApplySgd")
        found += sum(updates(attribute.g) for attribute in node.attribute)
    return found


class Options(TypedDict):
    accumulate: int
    max_grad_norm: float


def export(module: nn.Module, make_optimizer: MakeOptimizer, batch: Batch, **options: Any) -> TrainingStep:
    options = {"fuse": False, "evaluation": False} | options
    return export_training_step(module, F.cross_entropy, batch, make_optimizer(module), **options)


FUSED = {"adam", "adam_decay", "adamw", "adamw_groups", "adamw_maximize_fused", "sgd", "sgd_nesterov", "sgd_maximize"}


@pytest.mark.long
@pytest.mark.parametrize("name, fuse", [*((name, False) for name in VARIANTS), *((name, True) for name in VARIANTS)])
def test_a_hundred_steps_are_those_of_torch(name: str, fuse: bool) -> None:
    torch.manual_seed(0)
    module, data = Mlp(), batches(STEPS, 3)
    step = export(module, VARIANTS[name], data[0], fuse=fuse)
    onnx.checker.check_model(step.model, full_check=True)
    count = len(list(module.parameters())) if fuse and name in FUSED else 0
    assert updates(step.model.graph) == count
    session = TrainingSession(step)
    losses = [session.step(*batch) for batch in data]
    native, trained = train(module, VARIANTS[name], data, torch.float32)
    exact, reference = train(module, VARIANTS[name], data, torch.float64)
    assert_trained(session.state_dict(), trained, reference, STEPS)
    worst = max(abs(a - b) for a, b in zip(native, exact, strict=True))
    assert max(abs(a - b) for a, b in zip(losses, exact, strict=True)) <= 4 * worst
    assert losses[0] != losses[-1]


def types(model: onnx.ModelProto) -> set[int]:
    """The types of all values, as onnx infers them."""
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    graphs, found = [inferred.graph], set()
    while graphs:
        graph = graphs.pop()
        found |= {v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)}
        found |= {tensor.data_type for tensor in graph.initializer}
        for attribute in (attribute for node in graph.node for attribute in node.attribute):
            graphs += [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else []
            found |= {attribute.t.data_type} if attribute.type == onnx.AttributeProto.TENSOR else set()
    return found


@pytest.mark.parametrize("name", mostly_long(VARIANTS, ("adamw",)))
def test_a_hundred_steps_without_float64_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    module, data = Mlp(), batches(STEPS, 3)
    step = export(module, VARIANTS[name], data[0], float64=False)
    assert onnx.TensorProto.DOUBLE not in types(step.model)
    assert onnx.TensorProto.DOUBLE in types(export(module, VARIANTS[name], data[0]).model)
    session = TrainingSession(step)
    for batch in data:
        session.step(*batch)
    _, trained = train(module, VARIANTS[name], data, torch.float32)
    _, reference = train(module, VARIANTS[name], data, torch.float64)
    assert_trained(session.state_dict(), trained, reference, STEPS)


def test_all_options_do_without_float64() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    options = {"max_grad_norm": 0.3, "accumulate": 2, "grad_scaler": scaler, "float64": False}
    step = export(Whole(), VARIANTS["adamw_groups"], batches(1, 4)[0], **options)
    assert onnx.TensorProto.DOUBLE not in types(step.model)
    assert np.isfinite(TrainingSession(step).step(*batches(1, 4)[0]))


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999])
def test_bias_corrections_in_float32_lose_two_roundings_at_most(beta: float) -> None:
    nodes = Nodes("test")
    count = ir.Value(name="count", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n"]))
    result = rules._one_minus_power(beta, nodes.of(count)).value
    graph = ir.Graph([count], [result], nodes=nodes.tape.nodes, opset_imports={"": 20}, name="test")
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    counts = np.unique(np.logspace(0, 7, 4000).round())
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"count": counts.astype(np.float32)})
    with mpmath.workdps(30):
        exact = np.array([float(1 - mpmath.mpf(beta) ** int(n)) for n in counts])
    assert np.abs(found / exact - 1).max() <= 2 * np.finfo(np.float32).eps


def test_clipping_groups_and_a_schedule_of_rates() -> None:
    """All at once, and with a gradient norm that is clipped in some steps and not in others."""
    torch.manual_seed(1)
    module, data = Mlp(), batches(60, 3, seed=1)

    def make(module: nn.Module) -> torch.optim.Optimizer:
        return SGD(groups(module), lr=0.1, momentum=0.5)

    rates = [0.2 * 0.97**index for index in range(60)]
    session = TrainingSession(export(module, make, data[0], max_grad_norm=0.35))
    for rate, batch in zip(rates, data, strict=True):
        session.learning_rate = rate
        session.step(*batch)
    _, trained = train(module, make, data, torch.float32, rates=rates, max_grad_norm=0.35)
    _, reference = train(module, make, data, torch.float64, rates=rates, max_grad_norm=0.35)
    assert_trained(session.state_dict(), trained, reference, len(data))
    _, unclipped = train(module, make, data, torch.float32, rates=rates)
    assert any(not torch.allclose(a, b) for a, b in zip(trained.parameters(), unclipped.parameters(), strict=True))


@pytest.mark.parametrize("fuse", [False, True])
def test_gradients_accumulate_over_calls(fuse: bool) -> None:
    torch.manual_seed(2)
    module, data = Mlp(), batches(30, 3, seed=2)
    make, options = VARIANTS["adamw"], Options(accumulate=3, max_grad_norm=0.3)
    step = export(module, make, data[0], fuse=fuse, **options)
    onnx.checker.check_model(step.model, full_check=True)
    session = TrainingSession(step)
    before = session.state_dict()
    changed = []
    for batch in data:
        session.step(*batch)
        after = session.state_dict()
        changed.append(bool((after["first.weight"] != before["first.weight"]).any()))
        before = after
    assert changed == [False, False, True] * 10
    _, trained = train(module, make, data, torch.float32, **options)
    _, reference = train(module, make, data, torch.float64, **options)
    assert_trained(session.state_dict(), trained, reference, len(data))


def test_fused_updates_run_in_stock_onnxruntime_and_expand_to_standard_nodes() -> None:
    """By their function bodies, in the branches of an update that is clipped, scaled and accumulated too."""
    torch.manual_seed(5)
    module, data = Mlp(), batches(1, 3, seed=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    choices: list[dict[str, Any]] = [{}, {"max_grad_norm": 0.3, "accumulate": 2, "grad_scaler": scaler}]
    for options in choices:
        step = export(module, VARIANTS["adamw"], data[0], fuse=True, **options)
        assert updates(step.model.graph) == len(list(module.parameters()))
        arrays = {**step.parameters, **step.optimizer_state, **step.hyperparameters}
        feeds = {name: np.asarray(array) for name, array in arrays.items()}
        feeds |= {"micro_step": np.array(1)} if "accumulate" in options else {}
        names = (*step.input_names, *step.target_names)
        feeds |= {name: tensor.numpy() for name, tensor in zip(names, data[0], strict=True)}
        ours = onnxruntime.SessionOptions()
        gradfuse.register(ours)
        expected = onnxruntime.InferenceSession(step.model.SerializeToString(), ours).run(None, feeds)
        for model in (step.model, gradfuse.expand(step.model)):
            stock = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            for output, wanted in zip(stock.run(None, feeds), expected, strict=True):
                np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-7)
        assert updates(gradfuse.expand(step.model).graph) == 0


def test_betas_that_no_attribute_holds_keep_their_nodes() -> None:
    torch.manual_seed(0)
    module, data = Mlp(), batches(3, 3)

    def make(module: nn.Module) -> torch.optim.Optimizer:
        return ADAMW(module.parameters(), lr=0.01, betas=(1 / 3, 0.999))

    step = export(module, make, data[0], fuse=True)
    assert updates(step.model.graph) == 0


def test_what_the_optimizer_or_the_loss_leaves_alone_stays() -> None:
    """As in PyTorch, where such a parameter has no gradient: even weight decay does not touch it."""
    # With seed 0 Adam makes ten times more of the gradients' rounding, in PyTorch too.
    torch.manual_seed(1)
    module, data = Whole(), batches(3, 4)

    def make(module: nn.Module) -> torch.optim.Optimizer:
        return ADAMW([module.get_parameter(name) for name in ("embed.weight", "spare.weight")], lr=0.1)

    session = TrainingSession(export(module, make, data[0]))
    assert [value.name for value in session.training_step.model.graph.output] == [
        "loss",
        "embed.weight.updated",
        *(f"norm.{name}.updated" for name in ("running_mean", "running_var", "num_batches_tracked")),
        "embed.weight.exp_avg.updated",
        "embed.weight.exp_avg_sq.updated",
        "step.updated",
    ]
    for batch in data:
        session.step(*batch)
    _, trained = train(module, make, data, torch.float32)
    _, reference = train(module, make, data, torch.float64)
    assert_trained(session.state_dict(), trained, reference, len(data))
    assert (session.state_dict()["spare.weight"] == module.spare.weight.detach().numpy()).all()


@pytest.mark.parametrize("name", ["sgd_momentum", "adam_amsgrad"])
def test_a_step_goes_on_from_the_state_that_the_optimizer_has(name: str) -> None:
    torch.manual_seed(3)
    module, data = Mlp(), batches(20, 3, seed=3)
    exact = train(module, VARIANTS[name], data, torch.float64)[1]
    native = train(module, VARIANTS[name], data, torch.float32)[1]
    optimizer = VARIANTS[name](module)
    for x, y in data[:5]:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    kept = [tensor.clone() for entries in optimizer.state.values() for tensor in entries.values() if tensor is not None]
    session = TrainingSession(export(module, lambda _: optimizer, data[0]))
    now = [tensor for entries in optimizer.state.values() for tensor in entries.values() if tensor is not None]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    for batch in data[5:]:
        session.step(*batch)
    assert_trained(session.state_dict(), native, exact, len(data))


@pytest.mark.parametrize("fuse", [False, True])
def test_parameters_in_float64_are_updated_in_float64(fuse: bool) -> None:
    torch.manual_seed(0)
    module, data = Mlp().double(), [(x.double(), y) for x, y in batches(10, 3)]
    session = TrainingSession(export(module, VARIANTS["adamw"], data[0], max_grad_norm=0.5, fuse=fuse))
    for batch in data:
        session.step(*batch)
    _, reference = train(module, VARIANTS["adamw"], data, torch.float64, max_grad_norm=0.5)
    for name, tensor in reference.state_dict().items():
        # The learning rate is an input in float32, which 0.01 is no number of.
        assert abs(session.state_dict()[name] - tensor.numpy()).max() < 10 * 0.01 * 2**-24


def scaled(output: Tensor, target: Tensor) -> Tensor:
    """A loss that overflows float32 under the scale that the test begins at."""
    return 16 * F.cross_entropy(output, target)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_is_scaled_as_by_grad_scaler(accumulate: int) -> None:
    """Scale, skipped updates, growth and its counter, at the end of float32, where gradients overflow in earnest."""
    torch.manual_seed(4)
    module, data = Mlp(), batches(24, 3, seed=4)

    def new_scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3, growth_factor=4.0)

    step = export_training_step(
        module,
        scaled,
        data[0],
        VARIANTS["adamw"](module),
        grad_scaler=new_scaler(),
        max_grad_norm=0.5,
        accumulate=accumulate,
        evaluation=False,
    )
    onnx.checker.check_model(step.model, full_check=True)
    session = TrainingSession(step)
    twins = {}
    for dtype in (torch.float32, torch.float64):
        twin = copy.deepcopy(module).to(dtype)
        twins[dtype] = twin, VARIANTS["adamw"](twin), new_scaler()
    skipped = 0
    for index, (x, y) in enumerate(data):
        assert session.step(x, y) == pytest.approx(scaled(twins[torch.float64][0](x.double()), y).item(), abs=1e-5)
        before = [parameter.detach().clone() for parameter in twins[torch.float32][0].parameters()]
        for dtype, (twin, _, scaler) in twins.items():
            # In float64 no scaled gradient overflows: this one is told the scale.
            scale = scaler.scale if dtype == torch.float32 else lambda value: value
            scale(scaled(twin(x.to(dtype)), y) / accumulate).backward()
        if (index + 1) % accumulate:
            continue
        twin, optimizer, scaler = twins[torch.float32]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        done = any(not torch.equal(a, b) for a, b in zip(before, twin.parameters(), strict=True))
        twin, optimizer, _ = twins[torch.float64]
        if done:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            optimizer.step()
        optimizer.zero_grad()
        skipped += not done
        values = {name: session.ort_values[name].numpy() for name in ("loss_scale", "growth_tracker", "step")}
        assert values["loss_scale"] == scaler.get_scale()
        assert values["growth_tracker"] == scaler.state_dict()["_growth_tracker"]
        assert values["step"] == (index + 1) // accumulate - skipped
    assert skipped > 3
    assert_trained(session.state_dict(), twins[torch.float32][0], twins[torch.float64][0], len(data))


@pytest.mark.parametrize("fuse", (False, True))
def test_autocast_keeps_parameters_in_float32_and_computes_in_float16(fuse: bool) -> None:
    torch.manual_seed(5)
    module, data = Mlp(), batches(20, 3, seed=5)
    make, scaler = VARIANTS["sgd_momentum"], torch.amp.GradScaler("cpu")
    assert scaler.get_scale() == 65536  # more than a float16 can be
    step = export(module, make, data[0], autocast=torch.float16, grad_scaler=scaler, fuse=fuse)
    assert any(node.domain == "aclnn" for node in step.model.graph.node) == fuse
    assert {array.dtype.name for array in step.parameters.values()} == {"float32"}
    types = {value.name: value.type.tensor_type.elem_type for value in step.model.graph.value_info}
    products = [node for node in step.model.graph.node if node.op_type in ("Gemm", "MatMul")]
    assert {types[node.output[0]] for node in products} == {onnx.TensorProto.FLOAT16}
    session = TrainingSession(step)
    native = copy.deepcopy(module)
    optimizer = make(native)
    for x, y in data:
        session.step(x, y)
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(native(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert session.ort_values["loss_scale"].numpy() == scaler.get_scale()
    assert session.ort_values["growth_tracker"].numpy() == len(data)
    _, reference = train(module, make, data, torch.float64)
    for name, wanted in reference.state_dict().items():
        # Rounding to float16 in every gradient, which the two runtimes do not do at the same places.
        bound = 4 * (native.state_dict()[name].double() - wanted).abs().max() + 2**-12 * wanted.abs().max()
        assert abs(session.state_dict()[name] - wanted.numpy()).max() <= bound


def refused(make: Callable[[nn.Module], Any], **options: Any) -> str:
    module = Mlp()
    with pytest.raises(ExportError) as error:
        export_training_step(module, F.cross_entropy, batches(1, 3)[0], make(module), **{"fuse": False, **options})
    text = str(error.value)
    assert "\n" not in text
    return text


def replaced(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = SGD(module.parameters())
    vars(optimizer)["step"] = lambda: None
    return optimizer


def hooked(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = SGD(module.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def of_no_use(module: nn.Module) -> torch.optim.Optimizer:
    module.spare = nn.Linear(2, 2)
    return SGD(module.spare.parameters())


def thawed(kind: Callable[..., torch.optim.Optimizer], module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """An optimizer that gets its last layer after a step of the first."""
    optimizer = kind(module.get_submodule("first").parameters(), **options)
    x, y = batches(1, 3)[0]
    F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.add_param_group({"params": list(module.get_submodule("last").parameters())})
    return optimizer


@pytest.mark.parametrize("kind", [ADAM, SGD])
def test_frozen_parameters_of_an_optimizer_are_left_alone(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """They have state from before they were frozen; a group of them alone keeps its place among the learning rates."""
    torch.manual_seed(0)
    module, stranger = Mlp(), nn.Linear(2, 2).requires_grad_(False)
    first, last = (list(module.get_submodule(name).parameters()) for name in ("first", "last"))
    options: dict[str, Any] = {"weight_decay": 0.1} | ({"momentum": 0.9} if kind is SGD else {})
    groups = [{"params": first, "lr": 0.5}, {"params": [*last, *stranger.parameters()], "lr": 0.05}]
    optimizer = kind(groups, **options)
    x, y = batches(1, 3)[0]
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    module.get_submodule("first").requires_grad_(False)
    optimizer.zero_grad()
    session = TrainingSession(export_training_step(module, F.cross_entropy, (x, y), optimizer, max_grad_norm=1.0))
    assert session.learning_rate == pytest.approx((0.5, 0.05))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    session.step(x, y)
    F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    for name, array in session.state_dict().items():
        wanted = module.state_dict()[name]
        if name.startswith("first"):
            np.testing.assert_array_equal(array, before[name].numpy())
        assert_gradients_close(array, wanted, wanted.double(), np.float32, terms=4.0)


@pytest.mark.parametrize(
    "make, options, message",
    [
        (lambda m: 3, {}, "optimizer is int; expected a torch.optim.Optimizer, a list"),
        (lambda m: ADAM(m.parameters(), differentiable=True), {}, "differentiable is True in parameter group 0"),
        (lambda m: SGD([nn.Parameter(torch.ones(7))]), {}, "tensor of shape (7,) that is no trainable parameter"),
        (lambda m: SGD(m.parameters()), {"max_grad_norm": -1}, "max_grad_norm is -1; expected a positive number"),
        (lambda m: SGD(m.parameters()), {"accumulate": 0}, "accumulate is 0; expected a positive integer"),
        (lambda m: None, {"accumulate": 2}, "optimizer is None; expected one with max_grad_norm, accumulate, grad"),
        (
            lambda m: SGD(m.parameters()),
            {"grad_scaler": 8.0},
            "grad_scaler is float; expected gradfuse.optimizers",
        ),
        (
            lambda m: SGD(m.parameters()),
            {"autocast": torch.float64},
            "autocast is torch.float64; expected torch.float16",
        ),
        (
            lambda m: SGD(m.parameters()),
            {"float64": False, "fuse": True},
            "float64 is False; expected fuse=False with it",
        ),
        (hooked, {}, "optimizer has the hook hooked.<locals>.<lambda> (test_optimizers.py:"),
        (replaced, {}, "optimizer.step is replaced in the object; expected the step of its class"),
        (of_no_use, {}, "the loss depends on no parameter of the optimizer; expected at least one"),
        (lambda m: thawed(ADAM, m), {}, "has updated 'last.weight' 0 times and 'first.weight' 1 times; expected one"),
        (
            lambda m: thawed(SGD, m, momentum=0.9, dampening=0.5),
            {},
            "'last.weight' 0 times and 'first.weight' at least",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    assert message in refused(make, **options)


def test_momentum_without_dampening_may_begin_later_for_some_parameters() -> None:
    step = export(Mlp(), lambda m: thawed(SGD, m, momentum=0.9), batches(1, 3)[0])
    assert step.optimizer_state["first.bias.momentum_buffer"].any()
    assert not step.optimizer_state["last.bias.momentum_buffer"].any()


def test_options_that_only_choose_an_implementation_are_accepted() -> None:
    module, (batch,) = Mlp(), batches(1, 3)
    optimizer = ADAM(module.parameters(), foreach=True)
    step = export(module, lambda _: optimizer, batch)
    assert "first.weight.exp_avg" in step.optimizer_state


def test_names_that_the_optimizer_needs_are_left_to_parameters_and_changed_for_arguments() -> None:
    class Named(Mlp):
        def forward(self, step: torch.Tensor) -> torch.Tensor:
            return super().forward(step)

    module = Named()
    assert export(module, VARIANTS["adam"], batches(1, 3)[0], dynamic_shapes=SHAPES).input_names == ("input_step",)
    module.learning_rate = nn.Parameter(torch.ones(()))
    step = export(module, VARIANTS["adam"], batches(1, 3)[0])
    assert step.parameters["learning_rate"] == 1 and step.own_name("learning_rate") == "learning_rate_"
    session = TrainingSession(step)
    session.learning_rate = 0.5
    assert session.learning_rate == 0.5 and session.state_dict()["learning_rate"] == 1


def test_a_wrong_update_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfuse.training import optimizers

    def plain(self: optimizers.Optimizer, names: Any, who: str) -> optimizers.Optimizer:
        for group in self.groups:
            group.options["weight_decay"] = 0.5  # type: ignore[index]
        return self

    monkeypatch.setattr(optimizers.Optimizer, "restricted", plain)
    with pytest.raises(ExportError, match=r"output 'first\.weight\.updated' of the updating model differs"):
        export(Mlp(), VARIANTS["sgd"], batches(1, 3)[0])


def test_an_optimizer_with_a_scheduler_is_left_as_it_is() -> None:
    """A scheduler puts a wrapper of step into the object, which steps that object alone."""
    torch.manual_seed(0)
    module = Mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    batch = torch.randn(5, 4), torch.randint(0, 3, (5,))
    F.cross_entropy(module(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    before = copy.deepcopy(module.state_dict())
    export_training_step(module, nn.CrossEntropyLoss(), batch, optimizer)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not optimizer.state
