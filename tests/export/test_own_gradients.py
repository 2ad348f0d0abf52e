"""Functions with a backward pass of their own: the gradients of exported steps are theirs, at every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from like_torch import assert_like_torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradfuse import ExportError, TrainingSession, export_training_step


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float = 0.5) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.factor * grad, None


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (ctx.saved_tensors[0].abs() < 1)  # type: ignore[no-any-return]


class Clipped(torch.autograd.Function):
    """Does nothing to small gradients: a batch of them shows no difference from the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.01, 0.01)


class Several(torch.autograd.Function):
    """Three outputs, of which one has no gradient, and gradients that are not the formula's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, number: float) -> Any:
        ctx.save_for_backward(x, scale)
        ctx.number = number
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x * scale, (x + scale) * number, positive

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, first: Tensor, second: Tensor, _: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        of_x = 3 * (first * scale + second * ctx.number) if ctx.needs_input_grad[0] else None
        # Of more rows than the input has: PyTorch adds them up.
        return of_x, first * x + second * ctx.number, None


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] ** 2  # type: ignore[no-any-return]


class Recomputed(torch.autograd.Function):
    """Gradient checkpointing as codes of diffusion models have it."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.x, ctx.parameters = function, x, parameters
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.function(x)
        return None, *torch.autograd.grad(result, (x, *ctx.parameters), grad)


def applied(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


class Net(nn.Module):
    def __init__(self, function: Callable[[Net, Tensor], Tensor], learns: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4) if learns else nn.Identity()
        self.last = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.drop = nn.Dropout(0.5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))  # type: ignore[no-any-return]


def both(net: Net, x: Tensor) -> Tensor:
    first, second, positive = applied(Several, x, net.scale, 2.0)
    return torch.where(positive, first, second)


# As modules hold it: from before anything is traced.
reversed_gradient: Any = Reversed.apply

CASES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "no_grad within forward": lambda net, x: applied(Doubled, x),
    "reversed": lambda net, x: reversed_gradient(x, 2.0),
    "an argument left out": lambda net, x: applied(Reversed, x),
    "straight through": lambda net, x: applied(Rounded, x),
    "several outputs": both,
    "an output that nothing reads": lambda net, x: applied(Several, x, net.scale, 2.0)[0],
    "setup_context": lambda net, x: applied(Cubed, x),
    "one after the other": lambda net, x: applied(Reversed, applied(Rounded, applied(Cubed, x))),
    "recomputed": lambda net, x: applied(Recomputed, lambda y: net.last(y).tanh(), x, net.last.weight, net.last.bias),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(every=3)
def test_gradients_are_those_of_the_backward_pass(name: str) -> None:
    torch.manual_seed(0)
    module, batch = Net(CASES[name]), (torch.randn(3, 4), torch.randn(3, 4))
    step = export_training_step(module, nn.MSELoss(), batch, dynamic_shapes=({0: "rows"}, {0: "rows"}))
    assert_like_torch(step, module, nn.MSELoss(), batch)
    assert_like_torch(step, module, nn.MSELoss(), (torch.randn(5, 4), torch.randn(5, 4)))


@pytest.mark.parametrize("learns", [True, False])
def test_what_comes_after_no_grad_in_a_function_keeps_its_gradient(learns: bool) -> None:
    torch.manual_seed(0)
    module, batch = Net(CASES["no_grad within forward"], learns), (torch.randn(3, 4), torch.randn(3, 4))
    step = export_training_step(module, nn.MSELoss(), batch, fuse=False)
    assert_like_torch(step, module, nn.MSELoss(), batch)


def test_a_backward_pass_that_does_more_at_other_batches() -> None:
    torch.manual_seed(0)
    module = Net(lambda net, x: applied(Clipped, x))
    x = torch.randn(3, 4)
    with torch.no_grad():
        near = module(x) + 1e-3
    step = export_training_step(module, nn.MSELoss(), (x, near))
    assert_like_torch(step, module, nn.MSELoss(), (x, near))
    assert_like_torch(step, module, nn.MSELoss(), (x, near + 10.0))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.sampled(every=2)
def test_checkpoints_of_pytorch(reentrant: bool, share: float) -> None:
    """With dropout, both must drop the same: gradients and loss are compared when the step is exported."""
    torch.manual_seed(0)
    module = Net(lambda net, x: checkpoint(lambda y: net.drop(net.last(y).tanh()), x, use_reentrant=reentrant))
    module.drop.p = share
    batch = torch.randn(3, 4), torch.randn(3, 4)
    step = export_training_step(module, nn.MSELoss(), batch)
    if share:
        session = TrainingSession(step)
        assert session.step(*batch) != session.step(*batch)
    else:
        assert_like_torch(step, module, nn.MSELoss(), batch)


def under(context: Callable[[], Any]) -> Callable[[Net, Tensor], Tensor]:
    def function(net: Net, x: Tensor) -> Tensor:
        with context():
            offset = x.square().mean()
        return x + offset

    return function


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)])
def test_what_is_computed_without_gradients(context: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module, batch = Net(under(context)), (torch.randn(3, 4), torch.randn(3, 4))
    step = export_training_step(module, nn.MSELoss(), batch)
    assert_like_torch(step, module, nn.MSELoss(), batch)


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_function_that_writes_into_its_input_is_refused() -> None:
    batch = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(ExportError, match="writes into its input, which cannot be traced; expected one that returns"):
        export_training_step(Net(lambda net, x: applied(Written, x.clone())), nn.MSELoss(), batch)


class Chosen(torch.autograd.Function):
    """Reads numbers from a tensor in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        places = tuple(ctx.saved_tensors[0].argmax(1))
        return grad * torch.eye(9)[places, places][:, None]


def test_a_backward_pass_that_cannot_be_traced_is_named() -> None:
    batch = torch.randn(3, 4), torch.randn(3, 4)
    message = r"Chosen .*a backward pass .* cannot be traced: numbers .*, in Chosen.backward .*; expected"
    with pytest.raises(ExportError, match=message) as caught:
        export_training_step(Net(lambda net, x: applied(Chosen, x)), nn.MSELoss(), batch)
    assert "\n" not in str(caught.value)
