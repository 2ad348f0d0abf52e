"""Hooks on gradients: an exported step trains as PyTorch does with them, or is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from like_torch import trains_like_torch
from torch import Tensor, nn

from gradfuse import ExportError, TrainingSession, export_training_step
from gradfuse.export import gradient_hooks
from gradfuse.testing import assert_gradients_close
from gradfuse.training import splitting

Batch = tuple[Tensor, Tensor]


def _batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 9, (6, 4), generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(count)
    ]


def _register(tensor: Any, hook: Callable[[Tensor], Any]) -> Any:
    return tensor.register_hook(hook)


class Net(nn.Module):
    """Has tied, unused and later frozen parameters, and a buffer that changes with each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 5)
        self.norm = nn.BatchNorm1d(5)
        self.hidden, self.again = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.again.weight = self.hidden.weight
        self.out, self.spare, self.frozen = nn.Linear(5, 3), nn.Linear(2, 2), nn.Linear(5, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens).mean(1))
        x = torch.tanh(self.again(torch.tanh(self.hidden(x))))
        return self.out(self.frozen(x))  # type: ignore[no-any-return]


def _hooked() -> Net:
    module: Any = Net()
    rows = torch.ones(9, 1)
    rows[:4] = 0
    weight = module.hidden.weight
    module.embed.weight.register_hook(lambda gradient: gradient * rows)

    def doubled(gradient: Tensor) -> None:
        gradient.mul_(2)

    # In this order; of a parameter that is used twice they get the sum.
    weight.register_hook(lambda gradient: gradient * 3)
    weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    weight.register_hook(lambda gradient: gradient + 0.1 * weight)
    # As the forward pass leaves it.
    variance = module.norm.running_var
    module.out.bias.register_hook(lambda gradient: gradient * module.norm.running_mean[:3] / variance[:3])
    module.norm.weight.register_hook(lambda gradient: gradient.clamp_(-0.01, 0.01))
    module.norm.bias.register_hook(doubled)
    module.hidden.bias.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))
    module.out.weight.register_hook(lambda gradient: gradient)
    module.spare.weight.register_hook(lambda gradient: gradient + 1)
    module.frozen.weight.register_hook(lambda gradient: gradient.no_such_attribute)
    module.frozen.requires_grad_(False)
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize("fuse", [True, pytest.param(False, marks=pytest.mark.long)])
def test_hooks_change_gradients_as_in_pytorch(fuse: bool) -> None:
    session = trains_like_torch(_hooked, F.cross_entropy, _batches(5), fuse=fuse, evaluation=False)
    embedded = session.state_dict()["embed.weight"]
    fresh = Net().embed.weight.detach().numpy()
    np.testing.assert_array_equal(embedded[:4], fresh[:4])
    assert (embedded[4:] != fresh[4:]).any(1).all()


def _trained(dtype: torch.dtype, batches: list[Batch], scale: float, **settings: Any) -> dict[str, Tensor]:
    """Train in PyTorch with a constant scale of the loss, and return the parameters."""
    module = _clipped().to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, weight_decay=0.25)
    count = settings.get("accumulate", 1)
    for number, (x, y) in enumerate(batches, 1):
        (F.cross_entropy(module(x), y) * scale / count).backward()
        if number % count == 0:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= scale
            if "max_grad_norm" in settings:
                nn.utils.clip_grad_norm_(module.parameters(), settings["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
    return dict(module.named_parameters())


def _clipped() -> Net:
    module = Net()
    for parameter in module.parameters():
        _register(parameter, lambda gradient: gradient.clamp(-0.02, 0.02))
    return module


@pytest.mark.parametrize(
    "scale, settings",
    [(1.0, {"accumulate": 3, "max_grad_norm": 0.1}), pytest.param(4.0, {"accumulate": 2}, marks=pytest.mark.long)],
)
def test_hooks_come_ahead_of_sums_over_calls_clipping_and_decay_and_see_the_scaled_loss(
    scale: float, settings: dict[str, Any]
) -> None:
    batches, module = _batches(6), _clipped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, weight_decay=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100, enabled=scale != 1.0)
    options = settings | {"grad_scaler": scaler, "evaluation": False}
    session = TrainingSession(export_training_step(module, F.cross_entropy, batches[0], optimizer, **options))
    for x, y in batches:
        session.step(x, y)
    native, exact = (_trained(dtype, batches, scale, **settings) for dtype in (torch.float32, torch.float64))
    for name, got in session.state_dict().items():
        if name in exact:
            assert_gradients_close(got, native[name].detach(), exact[name].detach(), np.float32, terms=4.0)


def _counting() -> Callable[[Tensor], Tensor]:
    calls: list[None] = []

    def hook(gradient: Tensor) -> Tensor:
        calls.append(None)
        return gradient * len(calls)

    return hook


def _of_module(module: Net, name: str) -> Callable[[Tensor], Any]:
    mean, weight = module.norm.running_mean, module.hidden.weight
    assert mean is not None
    view, total = weight.detach(), torch.zeros(3)

    def observe(gradient: Tensor) -> None:
        gradient.norm()

    return {
        "observer": observe,
        "branch": lambda gradient: gradient * 2 if gradient.norm() > 1e-3 else gradient,
        "numpy": lambda gradient: torch.from_numpy(gradient.numpy() * 2),
        "fails": lambda gradient: gradient.reshape(7),
        "number": lambda gradient: 2,
        "shape": lambda gradient: gradient.sum(),
        "random": lambda gradient: gradient + torch.randn_like(gradient),
        "random of Python": lambda gradient: gradient * random.random(),
        "counter": _counting(),
        "other gradients": lambda gradient: gradient if module.out.weight.grad is None else gradient * 2,
        "writes": lambda gradient: gradient + mean.add_(1).sum(),
        "writes elsewhere": lambda gradient: gradient + total.add_(gradient).sum(),
        "writes into a view": lambda gradient: gradient + total[:1].zero_(),
        "writes by data": lambda gradient: gradient + mean.data.add_(1).sum(),
        "view": lambda gradient: gradient + view.sum(),
        "other when traced": lambda gradient: gradient if torch.compiler.is_exporting() else gradient * 2,
    }[name]


@pytest.mark.parametrize(
    "name, message",
    [
        ("observer", "returns None and only looks at it, .*; expected none: take it away by remove"),
        ("branch", "cannot be traced, as it is Python code on numbers .*torch.where in the place of if"),
        ("numpy", "cannot be traced, as it is Python code on numbers"),
        ("fails", "fails: shape '\\[7\\]' is invalid"),
        ("number", "returns int; expected a tensor or None"),
        ("shape", "has changed the size of value"),
        ("random", "draws random numbers, which no seed of the step determines; expected none"),
        ("random of Python", r"Python's generator in .*\(test_gradient_hooks\.py:\d+\)"),
        (
            "counter",
            r"computes something else each time that it runs, in .*\(test_gradient_hooks\.py:\d+\), as it chan",
        ),
        ("other gradients", "reads or sets .grad, which a backward pass fills in no order"),
        ("writes", "writes into 'norm.running_mean'; expected a function of the gradient"),
        ("writes elsewhere", r"writes into a tensor of shape \(3,\); expected a function of the gradient"),
        ("writes into a view", r"writes into a tensor of shape \(3,\); expected a function of the gradient"),
        ("writes by data", "writes into 'norm.running_mean'; expected a function of the gradient"),
        (
            "view",
            r"reads the memory of 'hidden\.weight', which is trained, by another tensor, in the hook .*; expected",
        ),
        ("other when traced", r"out\.bias\.grad.* differs from PyTorch"),
    ],
)
def test_what_cannot_be_a_function_of_the_gradient_is_refused(name: str, message: str) -> None:
    module = Net()
    hook = _of_module(module, name)
    _register(module.out.bias, hook)
    with pytest.raises(ExportError, match=message) as error:
        export_training_step(module, F.cross_entropy, _batches(1)[0])
    text = str(error.value)
    assert "\n" not in text and len(text) < 700
    if " in " not in message and "differs" not in message and name != "shape":
        assert "test_gradient_hooks.py:" in text and "on the gradient of 'out.bias'" in text
    assert module.out.bias.grad is None and list(module.out.bias._backward_hooks.values()) == [hook]  # type: ignore[union-attr]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first + self.second) * x


def test_a_hook_may_write_into_its_gradient_unless_another_one_has_its_memory() -> None:
    """In PyTorch both terms of a sum get one tensor; that the hook does nothing to these numbers hides nothing."""
    module = Sum()
    batch = torch.randn(4), torch.randn(4)
    handle = _register(module.first, lambda gradient: gradient.clamp_(-1e3, 1e3))
    with pytest.raises(ExportError, match=r"writes into a gradient that has the memory of another gradient: .*clamp"):
        export_training_step(module, F.mse_loss, batch)
    handle.remove()
    _register(module.first, lambda gradient: gradient.clamp(-1e3, 1e3))
    export_training_step(module, F.mse_loss, batch)


def test_hooks_on_parameters_of_a_step_with_a_gradient_penalty() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            output = self.second(torch.tanh(self.first(x)))
            (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            return output + gradient.pow(2).mean()  # type: ignore[no-any-return]

    def make() -> nn.Module:
        module = Penalised()
        _register(module.first.weight, lambda gradient: gradient.clamp(-0.01, 0.01))
        return module

    trains_like_torch(make, F.mse_loss, _pairs(3), evaluation=False)


def test_a_hook_on_what_the_step_differentiates_by_is_refused() -> None:
    class Penalty(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(super().forward(x).sum(), (self.weight,), create_graph=True)
            return super().forward(x) + gradient.pow(2).mean()

    module = Penalty(5, 4)
    _register(module.weight, lambda gradient: gradient * 2)
    with pytest.raises(ExportError, match="called within the step, which takes a derivative there itself; expected"):
        export_training_step(module, F.mse_loss, (torch.randn(3, 5), torch.randn(3, 4)))


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            result = torch.tanh(x @ weight)
        return None, *torch.autograd.grad(result, (weight,), grad)


def test_a_hook_that_a_function_of_the_step_calls_as_well_is_refused() -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return Recomputed.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]

    module = Recomputing()
    _register(module.weight, lambda gradient: gradient.clamp(-1e3, 1e3))
    with pytest.raises(ExportError, match=r"on the gradient of 'weight' is called several times in one backward pass"):
        export_training_step(module, F.mse_loss, _pairs(1)[0])


def test_a_step_that_is_divided_has_hooks_with_the_gradients() -> None:
    """Each process of several calls them, as PyTorch does before it averages; one may make a gradient a constant."""
    module = nn.Linear(5, 4)
    _register(module.weight, lambda gradient: gradient.clamp(-0.02, 0.02))
    _register(module.bias, lambda gradient: torch.full_like(gradient, 0.5))
    x, y = _pairs(1)[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    halves = splitting.split(export_training_step(module, F.mse_loss, (x, y), optimizer, evaluation=False), "test")
    session = onnxruntime.InferenceSession(ir.to_proto(halves.gradients).SerializeToString())
    feeds = {"input": x, "target": y, **dict(module.named_parameters())}
    given = {one.name: feeds[one.name].detach().numpy() for one in session.get_inputs()}
    weight, bias = session.run([halves.given["weight"], halves.given["bias"]], given)
    F.mse_loss(module(x), y).backward()  # type: ignore[no-untyped-call]
    wide = nn.Linear(5, 4).double()
    wide.load_state_dict(module.state_dict())
    F.mse_loss(wide(x.double()), y.double()).backward()  # type: ignore[no-untyped-call]
    assert module.weight.grad is not None and wide.weight.grad is not None
    exact = wide.weight.grad.clamp(-0.02, 0.02)
    assert_gradients_close(weight, module.weight.grad, exact, np.float32, terms=4.0)
    assert (bias == 0.5).all()


def test_hooks_behind_the_sum_and_on_gradients_of_inputs_are_refused() -> None:
    module: Any = nn.Linear(5, 4)
    x, y = torch.randn(3, 5, requires_grad=True), torch.randn(3, 4)
    _register(x, lambda gradient: gradient * 2)
    with pytest.raises(
        ExportError, match=r"a tensor of the batch has the hook .* on its gradient, and input_gradients"
    ):
        export_training_step(module, F.mse_loss, (x, y), input_gradients=["input"])
    module.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    match = (
        r"'bias' has the hook .*\(test_gradient_hooks\.py:\d+\) by register_post_accumulate_grad_hook; expected none"
    )
    with pytest.raises(ExportError, match=match):
        export_training_step(module, F.mse_loss, (x.detach(), y))


def test_a_hook_on_the_backward_passes_of_all_modules_is_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(
            ExportError, match=r"every module has the hook .*\(test_gradient_hooks\.py:\d+\) on its back"
        ):
            export_training_step(nn.Linear(5, 4), F.mse_loss, (torch.randn(3, 5), torch.randn(3, 4)))
    finally:
        handle.remove()


class Unrolled(nn.Module):
    """Registers hooks with what it computes: as models that unroll, reverse, clip or look at gradients do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.step, self.out = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.judge = nn.Linear(6, 4)
        self.count: Any
        self.register_buffer("count", torch.tensor(1.0))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if not self.training:
            return self.out(hidden)  # type: ignore[no-any-return]
        reverse = hidden.view_as(hidden)
        _register(reverse, lambda gradient: -gradient / self.count)
        judged = self.judge(reverse)
        # What was computed before counts too.
        _register(hidden, lambda gradient: gradient.clamp(-0.01, 0.01)), _register(hidden, self._look)
        _register(hidden, lambda gradient: gradient * 3 + 1e-3)
        for number in range(3):
            hidden = torch.tanh(self.step(hidden))
            # Of all rounds, it is the last one's number.
            _register(hidden, lambda gradient: gradient * (number - 1.5))  # noqa: B023
        hidden = hidden * 2
        _register(hidden, lambda gradient: gradient.mul_(0.5))
        hidden.add_(1)
        first, second = self.out(hidden).split([1, 3], 1)
        _register(second, torch.zeros_like)
        self.count += 1
        return torch.cat([first, second], 1) + judged  # type: ignore[no-any-return]

    def _look(self, gradient: Tensor) -> None:
        self.seen.append(float(gradient.sum()))


def _scaled_error(output: Tensor, target: Tensor) -> Tensor:
    error = F.mse_loss(output, target)
    if error.requires_grad:
        _register(error, lambda gradient: gradient * 0.25)
    return error


def _pairs(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(3, 5, generator=generator), torch.randn(3, 4, generator=generator)) for _ in range(count)]


@pytest.mark.parametrize("fuse", [True, pytest.param(False, marks=pytest.mark.long)])
def test_hooks_that_forward_registers_change_gradients_as_in_pytorch(fuse: bool) -> None:
    trains_like_torch(Unrolled, _scaled_error, _pairs(4), fuse=fuse)


class Registering(nn.Module):
    def __init__(self, register: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)
        self._register = register

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self._register(self, hidden)
        return self.second(hidden) + self.second(hidden * 1.0)  # type: ignore[no-any-return]


def _clipping(_: Any, hidden: Tensor) -> None:
    _register(hidden, lambda gradient: gradient.clamp(-1e3, 1e3))


def _doubled_when_traced(_: Any, hidden: Tensor) -> None:
    for _ in range(2 if torch.compiler.is_exporting() else 1):
        _register(hidden, lambda gradient: gradient * 2)


def _with_parameter(module: Any, _: Tensor) -> None:
    _register(module.first.weight, lambda gradient: gradient * 2)


def _branching(_: Any, hidden: Tensor) -> None:
    _register(hidden, lambda gradient: gradient * 2 if gradient.norm() > 1e-3 else gradient)


def _differentiated(_: Any, hidden: Tensor) -> None:
    _register(hidden, lambda gradient: gradient * 2)
    torch.autograd.grad(hidden.sum(), hidden, retain_graph=True)


@pytest.mark.parametrize(
    "register, message",
    [
        (_doubled_when_traced, "is registered 2 times when the step is traced, and 1 times when PyTorch runs it"),
        (
            _with_parameter,
            "changes the gradient of a parameter .*, once more in each call; expected it registered once",
        ),
        (_branching, "cannot be traced, as it is Python code on numbers"),
        (_differentiated, "is called within the step, which takes a derivative there itself"),
    ],
)
def test_hooks_that_forward_registers_are_refused_with_both_places(register: Any, message: str) -> None:
    places = r"the hook \S+<lambda> \(test_gradient_hooks\.py:\d+\) that is registered in _register \(test_gradient_"
    with pytest.raises(ExportError, match=f"{places}.*{message}") as error:
        export_training_step(Registering(register), F.mse_loss, _pairs(1)[0], evaluation=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("full", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_advice_for_hooks_of_modules_works(full: bool) -> None:
    def make(hooked: bool) -> nn.Sequential:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        part: Any = module[1]
        if hooked and full:
            part.register_full_backward_hook(lambda part, inputs, outputs: (inputs[0] * 0.5,))
        elif hooked:
            part.register_full_backward_pre_hook(lambda part, outputs: (outputs[0] * 0.5,))
        return module

    def scale(_: Any, inputs: Any, output: Tensor | None = None) -> None:
        given = inputs[0] if output is None else output
        if given.requires_grad:
            _register(given, lambda gradient: gradient * 0.5)

    x, y = _pairs(1)[0]
    with pytest.raises(ExportError, match=r"the part '1' \(Tanh\) has the hook .* call register_hook of its output"):
        export_training_step(make(True), F.mse_loss, (x, y))
    advised = make(False)
    (advised[1].register_forward_pre_hook if full else advised[1].register_forward_hook)(scale)
    session = TrainingSession(export_training_step(advised, F.mse_loss, (x, y)))
    session.step(x, y)
    native, exact = make(True), make(True).double()
    F.mse_loss(native(x), y).backward()  # type: ignore[no-untyped-call]
    F.mse_loss(exact(x.double()), y.double()).backward()  # type: ignore[no-untyped-call]
    wanted = {name: one.grad for name, one in exact.named_parameters()}
    for name, parameter in native.named_parameters():
        assert parameter.grad is not None and wanted[name] is not None
        assert_gradients_close(session.gradients[name], parameter.grad, wanted[name], np.float32, terms=4.0)


def test_a_hook_of_a_node_of_autograd_is_refused() -> None:
    def register(_: Any, hidden: Any) -> None:
        hidden.grad_fn.register_hook(lambda inputs, outputs: tuple(one.clamp(-1e3, 1e3) for one in inputs))

    match = (
        r"registers a hook with grad_fn, in .*register \(test_gradient_hooks\.py:\d+\); expected register_hook of the"
    )
    with pytest.raises(ExportError, match=match):
        export_training_step(Registering(register), F.mse_loss, _pairs(1)[0], evaluation=False)


def test_a_hook_in_another_place_is_seen_where_it_changes_nothing_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Registering(_clipping)
    monkeypatch.setattr(gradient_hooks, "put_in_place", lambda program: program)
    with pytest.raises(ExportError, match="changes other gradients in the exported step than in PyTorch; expected a"):
        export_training_step(module, F.mse_loss, _pairs(1)[0])


def test_a_hook_that_differentiates_is_refused_in_words_of_ours() -> None:
    """As the tutorial of deep equilibrium models has it."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(self.layer(x))
            before = z.detach().requires_grad_()
            after = torch.tanh(self.layer(before))
            z.register_hook(lambda g: torch.autograd.grad(after, before, g, retain_graph=True)[0] + g)  # type: ignore[no-untyped-call]
            return z

    with pytest.raises(
        ExportError, match=r"a tensor is computed where tracing does not follow, as by autograd\.grad in"
    ):
        export_training_step(Equilibrium(), F.mse_loss, (torch.randn(3, 4), torch.randn(3, 4)))
