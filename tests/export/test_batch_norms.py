"""Batch normalization in exported steps: which nodes it becomes. Each export compares its numbers with PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from like_torch import assert_like_torch
from torch import Tensor, nn

from gradfuse import TrainingSession, TrainingStep, export_training_step
from gradfuse.testing import assert_gradients_close

RELU_OUTPUT = 5


class Net(nn.Module):
    """A function of features and their normalization, between two convolutions."""

    def __init__(self, function: Callable[[Tensor, nn.Module], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = norm or nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 3, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x), self.norm)).mean((2, 3))  # type: ignore[no-any-return]


def exported(module: nn.Module, *sizes: int, **options: object) -> TrainingStep:
    torch.manual_seed(0)
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    batch = torch.randn(4, *(sizes or (2, 6, 5))), torch.randint(0, 3, (4,))
    return export_training_step(module, F.cross_entropy, batch, **options)  # type: ignore[arg-type]


def of_type(step: TrainingStep, *op_types: str) -> list[onnx.NodeProto]:
    return [node for node in step.model.graph.node if node.op_type in op_types]


def gated(step: TrainingStep) -> list[bool]:
    """Of each gradient of a normalization, whether a ReLU's is in it."""
    nodes = of_type(step, "BatchNormBackward")
    return [len(node.input) > RELU_OUTPUT and bool(node.input[RELU_OUTPUT]) for node in nodes]


def rectified(step: TrainingStep) -> list[bool]:
    """Of each normalization, whether a ReLU is in it."""
    return [any(one.name == "relu" and one.i for one in node.attribute) for node in of_type(step, "BatchNorm")]


GATES = ("LessOrEqual", "Greater", "ThresholdBackward")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, norm: norm(x).relu(),
        lambda x, norm: F.relu_(norm(x)),
        # The ReLU's output is read twice: its gradient is a sum, which one operator gates.
        lambda x, norm: (y := norm(x).relu()) + y.exp(),
        # Between them is what passes the gradient on.
        lambda x, norm: (norm(x) + 0.5).relu(),
    ],
)
@pytest.mark.sampled(every=2)
def test_the_gradient_of_a_relu_is_in_that_of_the_normalization(
    function: Callable[[Tensor, nn.Module], Tensor],
) -> None:
    step = exported(Net(function))
    assert gated(step) == [True]
    assert not of_type(step, *GATES)
    # The ReLU itself is in the normalization where it follows directly.
    assert len(of_type(step, "Relu")) == rectified(step).count(False)


@pytest.mark.long
@pytest.mark.parametrize(
    "function",
    [
        lambda x, norm: (norm(x) + x).relu(),
        # The normalization's output is read twice: its gradient is a sum with that of the ReLU.
        lambda x, norm: (y := norm(x)).relu() + y.sin(),
        lambda x, norm: (norm(x) * 2).relu(),
        lambda x, norm: F.threshold(norm(x), 0.1, 0.0),
        lambda x, norm: F.hardtanh(norm(x)),
        lambda x, norm: norm(x.relu()),
    ],
)
def test_other_gradients_stay_what_they_are(function: Callable[[Tensor, nn.Module], Tensor]) -> None:
    step = exported(Net(function))
    assert gated(step) == [False]
    assert of_type(step, *GATES, "Equal")
    assert rectified(step) == [False]


@pytest.mark.long
@pytest.mark.parametrize(
    "function, folded",
    [
        (lambda x, norm: norm(x).relu(), True),
        (lambda x, norm: (y := norm(x).relu()) + y.exp(), True),
        (lambda x, norm: (norm(x) + 0.5).relu(), False),
        (lambda x, norm: (y := norm(x)).relu() + y.sin(), False),
        (lambda x, norm: (y := norm(x)).relu() + y.relu(), False),
        (lambda x, norm: F.relu6(norm(x)), False),
    ],
)
def test_a_relu_that_is_all_that_reads_a_result_is_in_it(
    function: Callable[[Tensor, nn.Module], Tensor], folded: bool
) -> None:
    assert rectified(exported(Net(function))) == [folded]


class Two(nn.Module):
    """A residual block whose shortcut is normalized as well: both gradients are gated by one ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shortcut = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1)
        self.norm, self.other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)) + self.other(self.shortcut(x))
        return y.relu().mean((2, 3))  # type: ignore[no-any-return]


def test_a_gradient_that_two_read_is_in_neither() -> None:
    step = exported(Two())
    assert gated(step) == [False, False]
    assert of_type(step, *GATES)


@pytest.mark.long
@pytest.mark.parametrize("relu", (False, True))
@pytest.mark.parametrize(
    "module, sizes",
    [
        (nn.BatchNorm1d(3), (3,)),
        (nn.BatchNorm1d(3, affine=False), (3, 5)),
        (nn.BatchNorm3d(3), (3, 2, 3, 4)),
        (nn.BatchNorm2d(3, momentum=0.25, eps=1e-3), (3, 4, 4)),
        (nn.BatchNorm2d(3, track_running_stats=False), (3, 4, 4)),
    ],
    ids=str,
)
def test_normalizations_of_all_kinds(module: nn.Module, sizes: tuple[int, ...], relu: bool) -> None:
    width = int(torch.tensor(sizes).prod())
    layers = [nn.Flatten(), nn.Linear(width, width), nn.Unflatten(1, sizes), module, *([nn.ReLU()] if relu else [])]
    step = exported(nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3)), *sizes)
    assert gated(step) == [relu]
    assert rectified(step) == [relu]


@pytest.mark.parametrize("fuse", (True, False))
def test_a_normalization_that_has_no_parameters(fuse: bool) -> None:
    standardized = Net(lambda x, norm: F.batch_norm(x, None, None, training=True))
    step = exported(standardized, fuse=fuse)
    assert len(of_type(step, "BatchNormBackward")) == fuse


@pytest.mark.long
@pytest.mark.parametrize("frozen, mask", [("weight", [1, 0, 1]), ("bias", [1, 1, 0])])
def test_only_the_gradients_that_are_asked_for(frozen: str, mask: list[int]) -> None:
    module = Net(lambda x, norm: norm(x).relu())
    module.norm.get_parameter(frozen).requires_grad_(False)
    (node,) = of_type(exported(module), "BatchNormBackward")
    assert [list(one.ints) for one in node.attribute if one.name == "output_mask"] == [mask]


def test_a_batch_of_any_size() -> None:
    step = exported(Net(lambda x, norm: norm(x).relu()), dynamic_shapes=({0: "batch"}, {0: "batch"}))
    assert gated(step) == [True]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_normalization_of_one_type(dtype: torch.dtype) -> None:
    step = exported_as(dtype)
    assert gated(step) == [True]


def exported_as(dtype: torch.dtype) -> TrainingStep:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    batch = torch.randn(16, 4).to(dtype), torch.randint(0, 3, (16,))
    return export_training_step(module, F.cross_entropy, batch)


@pytest.mark.parametrize("between", (nn.ReLU(), nn.Identity()), ids=("relu", "none"))
def test_under_autocast_activations_are_narrow_beside_parameters_and_statistics(between: nn.Module) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), between, nn.Linear(6, 3))
    batch = torch.randn(16, 4), torch.randint(0, 3, (16,))
    step = export_training_step(module, F.cross_entropy, batch, autocast=torch.bfloat16)
    (forward,), (backward,) = of_type(step, "BatchNorm"), of_type(step, "BatchNormBackward")
    types = {v.name: v.type.tensor_type.elem_type for v in (*step.model.graph.value_info, *step.model.graph.input)}
    for node, activations in ((forward, {0}), (backward, {0, 1, 5})):
        for index, name in enumerate(node.input):
            if name in types:
                narrow = index in activations
                assert types[name] == (onnx.TensorProto.BFLOAT16 if narrow else onnx.TensorProto.FLOAT), (node, name)


def test_in_evaluation_mode_it_stays_in_pieces() -> None:
    module = Net(lambda x, norm: norm(x).relu())
    module.norm.eval()
    assert not of_type(exported(module), "BatchNorm", "BatchNormBackward")


def test_without_fusing_there_are_standard_operators_only() -> None:
    step = exported(Net(lambda x, norm: norm(x).relu()), fuse=False)
    assert {node.domain for node in step.model.graph.node} <= {""}


class Pair(nn.Module):
    """A network that runs on two inputs in a step, as in contrastive learning; the second time maybe in eval mode."""

    def __init__(self, norm: nn.Module, evaluates: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(3, 4, 1), norm, nn.Conv1d(4, 2, 1)
        self.evaluates = evaluates

    def net(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        y = self.net(a)
        self.norm.train(not self.evaluates)
        z = self.net(b)
        self.norm.train()
        return y - z


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(4),
    "over all batches": lambda: nn.BatchNorm1d(4, momentum=None),
    "without weights": lambda: nn.BatchNorm1d(4, affine=False),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.sampled(every=3)
def test_a_normalization_that_is_called_twice(name: str, evaluates: bool) -> None:
    """Running statistics go through both calls in their order, and take no gradients along."""
    torch.manual_seed(0)
    module = Pair(NORMS[name](), evaluates)
    batch = (torch.randn(4, 3, 5), torch.randn(4, 3, 5) + 1.0), torch.randn(4, 2, 5)
    step = export_training_step(module, nn.MSELoss(), batch, fuse=name != "without weights")
    assert_like_torch(step, module, nn.MSELoss(), batch)


def test_the_running_statistics_of_several_steps() -> None:
    torch.manual_seed(0)
    module = Pair(nn.BatchNorm1d(4, momentum=None), False)
    batch = (torch.randn(4, 3, 5), torch.randn(4, 3, 5) + 1.0), torch.randn(4, 2, 5)
    session = TrainingSession(export_training_step(module, nn.MSELoss(), batch))
    exact = copy.deepcopy(module).double()
    for _ in range(3):
        session.step(*batch)
        for one, kind in ((module, torch.float32), (exact, torch.float64)):
            one(*(x.to(kind) for x in batch[0]))
    state = session.state_dict()
    assert state["norm.num_batches_tracked"] == 6
    for name in ("norm.running_mean", "norm.running_var"):
        native, wanted = module.state_dict()[name], exact.state_dict()[name]
        assert_gradients_close(state[name], native, wanted, np.float32, terms=4.0)
