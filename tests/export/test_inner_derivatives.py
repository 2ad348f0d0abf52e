"""Steps that take derivatives themselves, against PyTorch over several updates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from like_torch import assert_like_torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradfuse import TrainingSession, export_training_step
from gradfuse.errors import ExportError
from gradfuse.export.dropout import SeededDropout
from gradfuse.testing import assert_gradients_close

ITEMS, STEPS = 6, 3


def network(inputs: int = 3, outputs: int = 1, *between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), *between, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs))


class Model(nn.Module):
    """A network, and a function of it and the inputs that returns what is compared and what is penalised."""

    def __init__(self, net: nn.Module, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.net = net
        self.function = function

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.function(self.net, *inputs)


def penalised(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + 0.3 * output[1]


def inputs_and_targets(*shape: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return (torch.randn(ITEMS, *(shape or (3,))),), (torch.randn(ITEMS, 1),)


def assert_trains_as_pytorch(
    module: nn.Module, loss: Callable[..., Tensor], batch: Any, *, dynamic: bool = True, **options: Any
) -> Any:
    """Compare parameters and losses after some updates, the second batch with one item less where sizes may vary."""
    native, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    shapes = tuple(tuple({0: "batch"} for _ in part) for part in batch) if dynamic else None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="export_training_step")
        step = export_training_step(module, loss, batch, optimizer, dynamic_shapes=shapes, **options)
    session = TrainingSession(step)
    every = options.get("accumulate", 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (native, exact)]
    losses: list[list[float]] = []
    for index in range(STEPS * every):
        kept = ITEMS - index % 2 if dynamic else ITEMS
        parts = [[tensor[:kept] for tensor in part] for part in batch]
        found = [float(session.step(*(tuple(one.numpy() for one in part) for part in parts)))]
        for one, update, dtype in zip((native, exact), optimizers, (torch.float32, torch.float64), strict=True):
            given = [[x.to(dtype) if x.is_floating_point() else x.clone() for x in part] for part in parts]
            with SeededDropout(torch.tensor(index)):
                value = loss(one(*(x.clone() for x in given[0])), *given[1])
            (value / every).backward()
            if index % every == every - 1:
                update.step()
                update.zero_grad()
            found.append(float(value.detach()))
        losses.append(found)
    own, single, double = np.array(losses).T
    assert_gradients_close(own.astype(np.float32), single.astype(np.float32), double, np.float32, terms=64 * double)
    state = session.state_dict()
    wide = dict(exact.state_dict())
    for name, value in native.state_dict().items():
        if value.is_floating_point():
            truth = wide[name].numpy()
            # Errors of updates add up.
            terms = 64 * max(1.0, float(np.abs(truth).max()))
            assert_gradients_close(state[name], value.numpy(), truth, np.float32, terms=terms)
    return step


def forces(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.requires_grad_()
    energy = net(x)
    (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy, gradient.square().mean()


def without_graph(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The first gradient is a constant to the outer one, as are what is detached and what `no_grad` computes."""
    x = x.requires_grad_()
    energy = net(x)
    (constant,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
    (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    with torch.no_grad():
        factor = net(x) * 2.0
    return energy * factor + (constant * net(x)).sum(1, keepdim=True), (gradient * gradient.detach()).sum()


def batched(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.requires_grad_()
    y = net(x)
    seeds = torch.eye(2)[:, None, :].expand(2, len(x), 2).to(y.dtype)
    (jacobian,) = torch.autograd.grad(y, x, seeds, is_grads_batched=True, create_graph=True)
    return y[:, :1], jacobian.square().mean()


def unused(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x, other = x.requires_grad_(), torch.zeros_like(x).requires_grad_()
    first, none = torch.autograd.grad(net(x).sum(), (x, other), create_graph=True, allow_unused=True)
    assert none is None
    second, zeros = torch.autograd.grad(net(x).sum(), (x, other), create_graph=True, materialize_grads=True)
    return net(x) + zeros.sum(), (first * second).mean()


def collected(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.requires_grad_()
    net(x).sum().backward(create_graph=True, inputs=[x])
    assert x.grad is not None
    return net(x), x.grad.square().mean()


def frozen_meanwhile(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    energy, penalty = forces(net, x)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    frozen = net(x * penalty)
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    return energy + frozen, penalty


def of_functions(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    gradient = grad(lambda z: net(z).sum())
    product = jvp(gradient, (x,), (torch.ones_like(x),))[1]
    y, pull = vjp(net, x)[:2]
    return y, product.square().mean() + pull(torch.ones_like(y))[0].square().mean()


def jacobians(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A contractive encoder: the square of its Jacobian, once in each mode."""
    backward, forward = vmap(jacrev(net))(x), vmap(jacfwd(net))(x)
    return net(x)[:, :1], (backward * forward).sum((1, 2)).mean()


def trace_of_hessian(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    second = vmap(hessian(lambda z: net(z).squeeze(-1)))(x)
    return net(x), second.diagonal(dim1=1, dim2=2).sum(1).square().mean()


def gradients_of_items(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    parameters: dict[str, Tensor] = dict(net.named_parameters())

    def loss(parameters: dict[str, Tensor], item: Tensor) -> Tensor:
        value: Tensor = functional_call(net, parameters, (item,)).square().sum()
        return value

    of_items = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    return net(x), sum((one.square().sum() for one in of_items.values()), torch.zeros(())) / len(x)


def sampled(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Langevin dynamics: each place is where the gradient without a graph has led."""
    for _ in range(2):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).sum(), x)
        x = x - 0.1 * gradient + 0.01 * torch.randn_like(x)
    return net(x.detach()), net(x).mean()


class Ensemble(nn.Module):
    """Networks whose parameters are stacked, as by `torch.func.stack_module_state`."""

    def __init__(self) -> None:
        super().__init__()
        made = [network(3, 1, nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(2)]
        stacked, _ = stack_module_state(made)
        self.names = list(stacked)
        self.stacked = nn.ParameterList([nn.Parameter(one.detach()) for one in stacked.values()])
        self.one = [copy.deepcopy(made[0]).to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        def called(*parameters: Tensor) -> Tensor:
            named = dict(zip(self.names, parameters, strict=True))
            result: Tensor = functional_call(self.one[0], named, (x,))
            return result

        return vmap(called)(*self.stacked).mean(0)


@pytest.mark.parametrize("shape", [(3,), (5, 3)])
def test_ensembles_by_vmap(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = Ensemble()
    batch = (torch.randn(ITEMS, *shape),), (torch.randn(ITEMS, *shape[:-1], 1),)
    assert_trains_as_pytorch(module, F.mse_loss, batch)


def heat_by_grad(net: nn.Module, points: Tensor) -> tuple[Tensor, Tensor]:
    x, t = points[:, :1].clone().requires_grad_(), points[:, 1:2].clone().requires_grad_()
    u = net(torch.cat([x, t], 1))
    by_x, by_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (by_x_twice,) = torch.autograd.grad(by_x.sum(), x, create_graph=True)
    return u, (by_t - 0.3 * by_x_twice).square().mean()


def heat_by_vmap(net: nn.Module, points: Tensor) -> tuple[Tensor, Tensor]:
    def u(x: Tensor, t: Tensor) -> Tensor:
        value: Tensor = net(torch.stack([x, t])).squeeze()
        return value

    x, t = points[:, 0], points[:, 1]
    residual = vmap(grad(u, 1))(x, t) - 0.3 * vmap(grad(grad(u)))(x, t)
    return vmap(u)(x, t).unsqueeze(1), residual.square().mean()


def heat_by_joined_points(net: nn.Module, points: Tensor) -> tuple[Tensor, Tensor]:
    def u(point: Tensor) -> Tensor:
        value: Tensor = net(torch.cat([point[:1], point[1:2]])).squeeze()
        return value

    by, twice = vmap(grad(u))(points[:, :2]), vmap(hessian(u))(points[:, :2])
    return vmap(u)(points[:, :2]).unsqueeze(1), (by[:, 1] - 0.3 * twice[:, 0, 0]).square().mean()


FUNCTIONS = {
    forces: (3, 1),
    without_graph: (3, 1),
    batched: (3, 2),
    unused: (3, 1),
    collected: (3, 1),
    frozen_meanwhile: (3, 1),
    of_functions: (3, 1),
    jacobians: (3, 2),
    trace_of_hessian: (3, 1),
    gradients_of_items: (3, 1),
    sampled: (3, 1),
    heat_by_grad: (2, 1),
    heat_by_vmap: (2, 1),
    heat_by_joined_points: (2, 1),
}


@pytest.mark.long
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_derivatives_within_a_module(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    sizes = FUNCTIONS[function]
    step = assert_trains_as_pytorch(Model(network(*sizes), function), penalised, inputs_and_targets(sizes[0]))
    assert step.evaluation_model is not None


@pytest.mark.parametrize("options", [{}, {"fuse": False, "float64": False}, {"accumulate": 2}], ids=str)
@pytest.mark.sampled(every=3)
def test_forces_with_options(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Model(network(), forces)
    module.net[0].weight.requires_grad_(False)  # type: ignore[index]
    assert_trains_as_pytorch(module, penalised, inputs_and_targets(), **options)


class Atoms(nn.Module):
    """Energies and forces of kinds of atoms and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, 4)
        self.net = network(6)

    def forward(self, kinds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.requires_grad_()
        first, second = torch.triu_indices(4, 4, 1)
        distances = (positions[:, first] - positions[:, second]).square().sum(-1, keepdim=True).add(1e-3).sqrt()
        known = self.kinds(kinds)
        energy = self.net(torch.cat([known[:, first] + known[:, second], torch.exp(-distances), distances**2], -1))
        (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy.sum((1, 2)), -gradient


@pytest.mark.long
def test_a_force_field_gives_forces_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    module = Atoms()
    batch = (torch.randint(0, 5, (ITEMS, 4)), torch.randn(ITEMS, 4, 3)), (torch.randn(ITEMS), torch.randn(ITEMS, 4, 3))

    def loss(output: tuple[Tensor, Tensor], energies: Tensor, forces: Tensor) -> Tensor:
        return F.mse_loss(output[0], energies) + F.mse_loss(output[1], forces)

    native, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    step = assert_trains_as_pytorch(module, loss, batch)
    outputs = TrainingSession(step).evaluate((batch[0][0].numpy(), batch[0][1].numpy()))
    truths = [
        one(batch[0][0], batch[0][1].to(dtype)) for one, dtype in ((native, torch.float32), (exact, torch.float64))
    ]
    for found, single, double in zip(outputs, *truths, strict=True):
        wide = double.detach().numpy()
        assert_gradients_close(found, single.detach().numpy(), wide, np.float32, terms=64 * np.abs(wide).max())


class Critic(nn.Module):
    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        layers = nn.Conv2d(1, 4, 3, stride=2, padding=1), *between, nn.LeakyReLU(0.2), nn.Conv2d(4, 4, 3, stride=2)
        self.net = nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(4, 1))

    def forward(self, real: Tensor, made: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        share = torch.rand(len(real), 1, 1, 1, dtype=real.dtype)
        between = (share * real + (1 - share) * made).detach().requires_grad_()
        scores = self.net(between)
        (gradient,) = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
        return self.net(real), self.net(made), (gradient.flatten(1).norm(dim=1) - 1).square().mean()


@pytest.mark.long
@pytest.mark.parametrize(
    "critic",
    [
        Critic(),
        Critic(nn.Dropout(0.3)),
        Critic(nn.BatchNorm2d(4)),
        Critic(nn.BatchNorm2d(4)).eval(),
        Critic(nn.InstanceNorm2d(4, affine=True), nn.MaxPool2d(1)),
    ],
    ids=["plain", "dropout", "batch_norm", "batch_norm_eval", "instance_norm"],
)
def test_gradient_penalties(critic: Critic) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(ITEMS, 1, 8, 8), torch.randn(ITEMS, 1, 8, 8)), ()

    def loss(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return output[1].mean() - output[0].mean() + 10.0 * output[2]

    assert_trains_as_pytorch(critic, loss, batch)


class Attention(nn.Module):
    """The gradient of attention by a kernel that the module asks for itself, with and without its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mixed = self.attention(x, x, x, need_weights=False)[0]
            queries, keys = mixed.unsqueeze(1), x.unsqueeze(1)
            y = F.scaled_dot_product_attention(queries, keys, keys, is_causal=True).squeeze(1)
        # PyTorch's kernel has no second derivative.
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y.mean((1, 2)).unsqueeze(1), (y * gradient).mean()


@pytest.mark.long
def test_a_kernel_of_attention_that_the_step_asks_for() -> None:
    torch.manual_seed(0)
    assert_trains_as_pytorch(Attention(), penalised, inputs_and_targets(5, 4))


class R1(nn.Module):
    """A loss that takes the gradient of the scores by the real points, which are its target."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, scores: Tensor, points: Tensor) -> Tensor:
        gradient = vmap(grad(lambda point: self.net(point).squeeze()))(points)
        penalty: Tensor = gradient.square().sum(1).mean()
        return F.softplus(-scores).mean() + penalty


def test_derivatives_within_a_loss() -> None:
    torch.manual_seed(0)
    net = network()
    points = torch.randn(ITEMS, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    shapes = ({0: "batch"}, {0: "batch"})
    step = export_training_step(net, R1(net), ((points,), (points,)), optimizer, dynamic_shapes=shapes)
    native, exact = copy.deepcopy(net), copy.deepcopy(net).double()
    found = float(TrainingSession(step).step(points.numpy(), points.numpy()))
    single, double = (float(R1(one)(one(x), x).detach()) for one, x in ((native, points), (exact, points.double())))
    assert_gradients_close(np.float32(found), np.float32(single), np.float64(double), np.float32, terms=64 * double)


class Coordinates(nn.Module):
    """A network and its coordinates, as of SIREN, so that the loss takes derivatives of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().detach().requires_grad_(True)
        return self.net(x), x


def _slope(output: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(output[0].sum(), output[1], create_graph=True)
    return F.mse_loss(slope, wanted)


def test_a_loss_of_derivatives_leaves_the_evaluation_model() -> None:
    torch.manual_seed(0)
    module = Coordinates()
    x = torch.randn(ITEMS, 3)
    step = export_training_step(module, _slope, ((x,), (x.cos(),)), evaluation=True)
    assert_like_torch(step, module, _slope, ((x,), (x.cos(),)))
    values, _ = TrainingSession(step).evaluate(x)
    np.testing.assert_allclose(values, module(x)[0].detach(), rtol=1e-5, atol=1e-6)


class Adapted(nn.Module):
    """What a network gives for a query after it has been trained on some examples, within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(1)

    def forward(self, x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        parameters: dict[str, Tensor] = dict(self.net.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(self.net, parameters, (x,)), y)
            gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
            parameters = {name: one - 0.1 * by for (name, one), by in zip(parameters.items(), gradients, strict=True)}
        adapted: Tensor = functional_call(self.net, parameters, (query,))
        return adapted


@pytest.mark.long
def test_adaptation_within_a_step() -> None:
    torch.manual_seed(0)
    batch = tuple(torch.randn(ITEMS, 1) for _ in range(3)), (torch.randn(ITEMS, 1),)
    assert_trains_as_pytorch(Adapted(), F.mse_loss, batch, dynamic=False)


def test_what_adds_to_gradients_of_parameters_is_refused() -> None:
    def adds(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        net(x).sum().backward(create_graph=True)
        assert x.grad is not None
        return net(x), x.grad.square().mean()

    with pytest.raises(ExportError, match=r"calls backward\(\), which adds to \.grad of 'net\.0\.weight'"):
        export_training_step(Model(network(), adds), penalised, inputs_and_targets())


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_function_whose_own_gradient_is_taken_within_the_step_is_named() -> None:
    def rounded(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        applied: Any = Rounded.apply
        (gradient,) = torch.autograd.grad(net(applied(x.requires_grad_())).sum(), x, create_graph=True)
        return net(x), gradient.square().mean()

    with pytest.raises(ExportError, match=r"'loss' .* differs .*; Rounded has a backward pass of its own, .* detach"):
        export_training_step(Model(network(), rounded), penalised, inputs_and_targets())


def test_gradients_of_the_loss_of_each_item() -> None:
    """As differentially private training takes them; each item is also sorted."""

    class Private(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            def loss(parameters: dict[str, Tensor], item: Tensor, label: Tensor) -> Tensor:
                logits = F.linear(item.sort()[0], parameters["weight"], parameters["bias"]).sort()[0]
                return F.cross_entropy(logits.unsqueeze(0), label.unsqueeze(0))

            parameters: dict[str, Tensor] = dict(self.layer.named_parameters())
            of_items = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, target)
            total: Tensor = of_items["weight"].square().sum()
            return F.cross_entropy(self.layer(x), target) + total

    torch.manual_seed(0)
    module = Private()
    batches = [((torch.randn(items, 4), torch.randint(0, 3, (items,))), ()) for items in (5, 7)]
    shapes = ({0: "batch"}, {0: "batch"}), ()
    step = export_training_step(module, _itself, batches[0], dynamic_shapes=shapes)
    assert_like_torch(step, module, _itself, batches[1])


def _itself(loss: Tensor) -> Tensor:
    return loss


def test_an_operator_of_known_sizes_is_named() -> None:
    def pooled_items(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        gradient = vmap(grad(lambda item: net(F.max_pool1d(item[None], 3, 1, 1)[0]).squeeze()))(x)
        return net(x), gradient.square().mean()

    shapes = ({0: "batch"}, {0: "batch"})
    with pytest.raises(ExportError, match=r"within vmap takes sizes that are known alone"):
        export_training_step(Model(network(), pooled_items), penalised, inputs_and_targets(), dynamic_shapes=shapes)


def test_what_crashes_pytorch_is_refused() -> None:
    def third(net: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = vmap(jacrev(hessian(lambda point: net(point).squeeze())))(x)
        return found

    class Third(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return third(self.net, x).square().mean()

    with pytest.raises(ExportError, match="three derivatives in one another within vmap"):
        export_training_step(Third(), None, (torch.randn(2, 3), None))
