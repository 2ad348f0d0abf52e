"""What a module changes of itself while it runs: frozen parameters, what is frozen, what it keeps, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from like_torch import trains_like_torch
from torch import Tensor, nn

import gradfuse
from gradfuse import ExportError, export_training_step
from gradfuse.testing import assert_gradients_close


def _batch(items: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(items)
    return torch.randn(items, 5), torch.randn(items, 4)


def _trains_as_pytorch(
    module: nn.Module, criterion: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
) -> gradfuse.TrainingSession:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    shapes = ({0: "batch"}, {0: "batch"})
    step = export_training_step(module, criterion, _batch(), optimizer, fuse=False, dynamic_shapes=shapes)
    session = gradfuse.TrainingSession(step)
    for items in (6, 3, 6):
        x, y = _batch(items)
        optimizer.zero_grad()
        loss = criterion(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert session.step(x.numpy(), y.numpy()) == pytest.approx(loss.item(), rel=1e-5)
    state = session.state_dict()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(torch.as_tensor(state[name]), tensor, rtol=1e-4, atol=1e-5)
    return session


def _by_copies(teacher: Tensor, student: Tensor) -> None:
    teacher.copy_(teacher * 0.9 + student * 0.1)


def _by_data(teacher: Tensor, student: Tensor) -> None:
    teacher.data = teacher.data * 0.9 + student.data * 0.1


def _in_data(teacher: Tensor, student: Tensor) -> None:
    teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


def _together(teacher: Tensor, student: Tensor) -> None:
    torch._foreach_lerp_([teacher], [student], 0.1)


def _in_detached(teacher: Tensor, student: Tensor) -> None:
    """As through `state_dict()`, which detaches."""
    teacher.detach().copy_(teacher * 0.9 + student * 0.1)


class Following(nn.Module):
    """Two layers, the second of which is frozen and follows the first, as in momentum contrast."""

    def __init__(self, follow: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(5, 4), nn.Linear(5, 4).requires_grad_(False)
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.follow(teacher, student)
        return self.student(x) + self.teacher(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("follow", [_by_copies, _by_data, _in_data, _together, _in_detached])
@pytest.mark.sampled(every=2)
def test_frozen_parameters_that_the_step_changes_are_buffers(follow: Callable[[Tensor, Tensor], None]) -> None:
    _trains_as_pytorch(Following(follow))


class FollowingSometimes(nn.Module):
    """A target network that takes the other one's weights in each second step, not in the first one."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(5, 4), nn.Linear(5, 4).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.student(x) - self.teacher(x)
        self.steps += 1
        if self.steps % 2 == 0:
            for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                teacher.data.copy_(student.data)
        return y


def test_frozen_parameters_that_only_some_steps_change_are_buffers() -> None:
    _trains_as_pytorch(FollowingSometimes())


def test_a_frozen_parameter_that_gets_the_memory_of_a_trained_one_is_refused() -> None:
    def share(teacher: Tensor, student: Tensor) -> None:
        teacher.data = student.data

    match = r"gives 'teacher\.weight' the memory of 'student\.weight', which is trained; expected a copy"
    with pytest.raises(ExportError, match=match):
        export_training_step(Following(share), F.mse_loss, _batch())


class Queue(nn.Module):
    """Keeps keys in a buffer, with a pointer to the oldest of them in another one, as momentum contrast does."""

    def __init__(self, number: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.keys = nn.Linear(5, 4), nn.Linear(5, 4).requires_grad_(False)
        self.queue: Tensor
        self.pointer: Tensor
        self.register_buffer("queue", torch.randn(4, 9))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self._number = number

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            keys = self.keys(x)
        scores = self.queries(x) @ torch.cat([keys.T, self.queue.clone()], 1)
        pointer = self._number(self.pointer)
        self.queue[:, pointer : pointer + len(x)] = keys.T
        self.pointer[0] = (pointer + len(x)) % 9
        return scores  # type: ignore[no-any-return]


def _by_int(pointer: Tensor) -> int:
    return int(pointer)


@pytest.mark.parametrize("number", [Tensor.item, _by_int])
def test_a_pointer_into_a_queue_is_a_number_of_the_batch(number: Callable[[Tensor], Any]) -> None:
    batches = [(torch.randn(3, 5), torch.tensor([0, 1, 2])) for _ in range(4)]
    trains_like_torch(lambda: Queue(number), F.cross_entropy, batches, evaluation=False)


class Written(nn.Module):
    """Two layers, and what a function does first and what another one does between them."""

    def __init__(self, first: Callable[[Any], Any] = id, between: Callable[[Any, Any], Any] = max) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 4)
        self.kept: Any = None
        self.more = nn.ModuleList()
        self._functions = first, between

    def forward(self, x: Tensor) -> Tensor:
        self._functions[0](self)
        hidden = self.first(x)
        self._functions[1](self, hidden)
        for one in self.more:
            hidden = one(hidden)
        return self.second(hidden)  # type: ignore[no-any-return]


def _nothing(*_: Any) -> None:
    pass


def test_a_part_that_is_frozen_in_forward_stays_as_it_is() -> None:
    module = Written(lambda module: module.first.requires_grad_(False), _nothing)
    before = module.first.weight.detach().clone()
    session = _trains_as_pytorch(module)
    assert torch.equal(torch.as_tensor(session.state_dict()["first.weight"]), before)


def _masked(_: Any, hidden: Tensor) -> None:
    hidden.data.masked_fill_(hidden > 0.5, 0.25)


def _twice(_: Any, hidden: Tensor) -> None:
    hidden.data.mul_(2.0)
    hidden.data[:, 1:].add_(hidden.data[:, :1])


def _by_detach(_: Any, hidden: Tensor) -> None:
    hidden.detach().clamp_(-0.5, 0.5)


def _without_gradients(_: Any, hidden: Tensor) -> None:
    with torch.no_grad():
        hidden.data.mul_(3.0)


@pytest.mark.parametrize("between", [_masked, _twice, _by_detach, _without_gradients])
@pytest.mark.sampled(every=2)
def test_what_is_written_past_the_gradient_of_a_result_leaves_it_as_it_was(between: Callable[..., None]) -> None:
    """As Tacotron 2 masks the scores of its attention."""
    _trains_as_pytorch(Written(_nothing, between), lambda output, target: F.mse_loss(output.sin(), target))


def _advantages(_: Any, hidden: Tensor) -> Tensor:
    """As a loop from the last step of a trajectory to the first one fills a table."""
    table, last = torch.zeros(hidden.shape), torch.zeros(len(hidden))
    with torch.no_grad():
        for index in reversed(range(4)):
            last = table[:, index] = hidden[:, index + 1] - hidden[:, index] + 0.5 * last
    return table


def _rows(_: Any, hidden: Tensor) -> Tensor:
    """What is written with gradients keeps them."""
    table = torch.zeros(hidden.shape)
    row = table[0]
    with torch.no_grad():
        row.add_(hidden[1])
    table[1] = hidden[2].sin()
    return table + row


def _in_data_of_a_new_one(_: Any, hidden: Tensor) -> Tensor:
    table = torch.zeros(hidden.shape)
    table.data.copy_(hidden).t().lerp_(hidden.sin().t(), 0.25)
    table.detach()[0] = hidden[1]
    return table


@pytest.mark.parametrize("between", [_advantages, _rows, _in_data_of_a_new_one])
def test_what_is_written_past_the_gradient_of_a_new_tensor_has_none(between: Callable[..., Tensor]) -> None:
    class Read(Written):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.second(hidden * between(self, hidden))  # type: ignore[no-any-return]

    _trains_as_pytorch(Read())


def test_a_codebook_follows_what_is_assigned_to_it() -> None:
    """As vector quantisation averages the rows that chose a code, in a layout of its own."""

    class Codes(nn.Linear):
        codes: Tensor

        def __init__(self) -> None:
            super().__init__(5, 4)
            self.register_buffer("codes", torch.linspace(-1.0, 1.0, 12).view(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            rows = super().forward(x)
            chosen = torch.cdist(rows, self.codes).argmin(1)
            counts = F.one_hot(chosen, 3).to(rows.dtype)
            found = self.codes[chosen]
            self.codes.data.lerp_((rows.t() @ counts).t(), 0.25)
            return rows + (found - rows).detach() + self.codes[0]

    _trains_as_pytorch(Codes())


def test_an_alias_that_was_written_into_has_no_gradient_where_it_is_read() -> None:
    class Read(Written):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            data = hidden.data
            data.mul_(2.0)
            result = hidden[:, :4] + data[:, 1:]
            data.add_(1.0)
            return self.second(hidden) + result * data[:, :4]  # type: ignore[no-any-return]

    _trains_as_pytorch(Read())


def _by_method(network: nn.Module, learns: bool) -> None:
    network.requires_grad_(learns)


def _by_attribute(network: nn.Module, learns: bool) -> None:
    for parameter in network.parameters():
        parameter.requires_grad = learns


@pytest.mark.parametrize("set_learning", [_by_method, _by_attribute])
def test_a_network_that_is_frozen_meanwhile_has_no_gradient_there(set_learning: Callable[..., None]) -> None:
    """As a discriminator while it judges for the generator."""

    class Adversarial(Written):
        def forward(self, x: Tensor) -> Tensor:
            made = self.first(x)
            judged = self.second(made.detach()).tanh()
            set_learning(self.second, False)
            judged = judged + self.second(made).sin()
            set_learning(self.second, True)
            return judged * self.second(x)  # type: ignore[no-any-return]

    _trains_as_pytorch(Adversarial())


class Divided(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output / output.abs().max().item()


def test_numbers_taken_out_of_tensors_have_no_gradient() -> None:
    """As in losses that are balanced by their values, and in what is divided by its largest number."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        first, second = F.mse_loss(output, target), output.abs().mean()
        return first + second * (first.item() / second.item())

    _trains_as_pytorch(Divided(5, 4), loss)


def test_a_hook_that_looks_at_a_gradient_does_not_matter() -> None:
    seen: list[float] = []

    def look(gradient: Tensor) -> None:
        seen.append(float(gradient.sum()))

    _trains_as_pytorch(Written(_nothing, lambda _, hidden: hidden.register_hook(look) if hidden.requires_grad else 0))
    assert seen


def test_the_advice_to_scale_a_gradient_works() -> None:
    class Scaling(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self[0](x)
            return self[1](hidden * 0.3 + (hidden * 0.7).detach())  # type: ignore[no-any-return]

    _trains_as_pytorch(Scaling(nn.Linear(5, 5), nn.Linear(5, 4)))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_hook_on_the_backward_pass_of_a_part_is_refused_by_name(register: str) -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 4))
    getattr(module[1], register)(_nothing)
    with pytest.raises(ExportError, match=r"the part '1' \(Linear\) has the hook _nothing \(.*\) on its backward pass"):
        export_training_step(module, F.mse_loss, _batch())


def test_a_list_of_modules_that_grows_is_refused_with_its_line_and_put_back() -> None:
    module = Written(lambda module: module.more.append(module.first), _nothing)
    with pytest.raises(
        ExportError, match=r"test_changes_in_forward\.py:\d+\), as it changes Written\.more\.0 in Python"
    ):
        export_training_step(module, F.mse_loss, _batch())
    assert not module.more


class Merging(nn.Module):
    """Keeps the product of two layers' weights while it is in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 4, bias=False)
        self.merged: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.merged = None
            return self.second(self.first(x))  # type: ignore[no-any-return]
        if self.merged is None:
            self.merged = (self.second.weight @ self.first.weight).detach()
        return F.linear(x, self.merged)


def test_what_is_kept_in_evaluation_mode_follows_the_trained_parameters() -> None:
    module = Merging()
    session = _trains_as_pytorch(module)
    x, _ = _batch(4)
    torch.testing.assert_close(torch.as_tensor(session.evaluate(x.numpy())), module.eval()(x), rtol=1e-4, atol=1e-5)


def test_a_complex_parameter_is_refused_by_name() -> None:
    module = nn.Linear(5, 4)
    module.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ExportError, match=r"parameter 'phase' is torch\.complex64; expected real numbers"):
        export_training_step(module, F.mse_loss, _batch())


def _by_module(module: Any, x: Tensor) -> Tensor:
    return module.norm(x)  # type: ignore[no-any-return]


def _by_function(module: Any, x: Tensor) -> Tensor:
    norm = module.norm
    return torch.batch_norm(x, None, None, norm.running_mean, norm.running_var, True, 0.1, 1e-5, False)


def _by_function_without_flags(module: Any, x: Tensor) -> Tensor:
    norm = module.norm
    return F.instance_norm(x.T[None], norm.running_mean, norm.running_var)[0].T


def _by_foreach(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_add_([module.norm.running_mean], [x.mean(0)])
    return x + module.norm.running_mean  # type: ignore[no-any-return]


@pytest.mark.parametrize("keeps", [_by_module, _by_function, _by_function_without_flags, _by_foreach])
@pytest.mark.sampled(every=3)
def test_statistics_that_a_batch_leaves_alone_change_with_the_next(keeps: Callable[[Any, Tensor], Tensor]) -> None:
    class Opens(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return keeps(self, self.linear(x) * (self.count > 1))

    torch.manual_seed(0)
    module, x, y = Opens(), torch.randn(5, 3), torch.randn(5, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    session = gradfuse.TrainingSession(export_training_step(module, F.mse_loss, (x, y), optimizer))
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        session.step(x.numpy(), y.numpy())
    mean = module.norm.running_mean
    assert mean is not None and mean.abs().min() > 1e-3
    native = mean.numpy()
    assert_gradients_close(session.state_dict()["norm.running_mean"], native, native.astype(np.float64), np.float32)


def test_an_export_in_inference_mode_and_a_norm_without_bound_are_as_without() -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torch.inference_mode():
        step = export_training_step(module, F.mse_loss, _batch(), optimizer, max_grad_norm=float("inf"), fuse=False)
    session = gradfuse.TrainingSession(step)
    x, y = _batch()
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert session.step(x, y) == pytest.approx(loss.item(), rel=1e-5)


class Table(nn.Module):
    """A layer with a table that it makes when it is first needed, as of relative positions in timm's ConViT."""

    table: Tensor

    def __init__(self, is_buffer: bool, grows: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.grows = nn.Linear(5, 4), nn.BatchNorm1d(4), grows
        if is_buffer:
            self.register_buffer("table", torch.zeros(1, 1))
        else:
            self.table = torch.zeros(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.grows:
            self.table = torch.cat([self.table, self.table + 1])
        elif self.table.shape[1] != x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=torch.float32)[None]
        return self.norm(self.linear(x + self.table.sum(0)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_table_that_the_first_step_makes_is_there_from_the_beginning(is_buffer: bool) -> None:
    session = _trains_as_pytorch(Table(is_buffer))
    assert ("table" in session.state_dict()) == is_buffer


def test_a_buffer_whose_size_goes_on_changing_is_refused_by_its_name() -> None:
    module = Table(is_buffer=True, grows=True)
    with pytest.raises(ExportError, match=r"'table' of shape \(1, 1\) into one of \(2, 1\) .* keeps its shape$"):
        export_training_step(module, F.mse_loss, _batch(), torch.optim.SGD(module.parameters(), lr=0.1))


class Scaled(nn.Module):
    """A layer with a scale that it takes from the first numbers that it sees: a batch, indices or parameters."""

    scale: Tensor

    def __init__(self, of: str) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(5, 4), of
        self.embed = nn.Embedding(7, 5)
        self.register_buffer("scale", torch.zeros(0))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if not self.scale.numel():
            seen = {"batch": x, "parameters": self.linear.weight, "indices": ids.float()}[self.of].detach()
            self.scale = seen.mean(0) + 2
        return self.linear(x / self.scale.mean() + self.embed(ids))  # type: ignore[no-any-return]


@pytest.mark.parametrize("of", ["batch", "indices", "parameters"])
def test_a_buffer_that_the_first_step_makes_of_its_numbers_is_refused_and_the_advice_works(of: str) -> None:
    module = Scaled(of)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    (x, y), ids = _batch(), torch.tensor([3, 1, 4, 1, 5, 2])
    with pytest.raises(ExportError, match=r"'scale' .* from the batch or from parameters; .* after a run"):
        export_training_step(module, F.mse_loss, ((x, ids), y), optimizer)
    module(x * 3, ids)
    session = gradfuse.TrainingSession(export_training_step(module, F.mse_loss, ((x, ids), y), optimizer))
    loss = F.mse_loss(module(x, ids), y)
    assert session.step((x, ids), y) == pytest.approx(loss.item(), rel=1e-5)


def test_a_buffer_that_the_first_step_makes_is_refused_where_no_other_indices_can_be_tried() -> None:
    """Of a batch of zeros nothing tells what they are used for."""
    module = Scaled("indices")
    module.embed = nn.Embedding(1, 5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    (x, y), ids = _batch(), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ExportError, match="may compute it from 'ids', of which no other values could be tried"):
        export_training_step(module, F.mse_loss, ((x, ids), y), optimizer)
