"""Programs are decomposed once for each kind of call, and compute what their modules do, at any size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import _torch_private as private
from gradfuse.export import decomposing
from gradfuse.export.decompositions import forward

Function = Callable[[Tensor, Tensor], Any]


class Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        # A program writes into copies of its inputs.
        return self.function(x.clone(), y.clone())


def traced(function: Function) -> torch.export.ExportedProgram:
    rows = {0: torch.export.Dim("rows", min=3), 1: torch.export.Dim("columns", min=4)}
    batch = torch.randn(5, 6), torch.randn(5, 6)
    return torch.export.export(Module(function), batch, dynamic_shapes=(rows, rows))


def decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    table: dict[Any, Any] = dict(torch.export.default_decompositions())
    return decomposing.decompose(program, table | forward.table())


@pytest.fixture
def whole_programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls the programs have that PyTorch decomposes."""
    counts: list[int] = []
    original = torch.export.ExportedProgram.run_decompositions

    def run_decompositions(self: Any, *arguments: Any) -> Any:
        counts.append(sum(node.op == "call_function" for node in self.graph.nodes))
        return original(self, *arguments)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", run_decompositions)
    return counts


def normalized_twice(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    mean, variance = torch.zeros_like(x[0]), torch.ones_like(x[0])
    first = F.batch_norm(x, mean, variance, training=True)
    return first, F.batch_norm(y, mean, variance, training=True), F.batch_norm(y, mean, variance), mean, variance


def written_behind_a_view(x: Tensor, y: Tensor) -> Tensor:
    seen = x.view(-1)
    x.add_(1)
    return seen * 2 + y.reshape(-1)


def written_into_a_part(x: Tensor, y: Tensor) -> Tensor:
    x[:, 0] *= 3
    rest = x[:, 2:]
    rest.relu_()
    return x.sum(0) + rest.sum() + y


def read_before_and_after(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    before = x * 2
    also = x.relu_()
    x.mul_(y)
    return before, also + x, x.add_(x), also


def with_no_grad(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean()
    return x - mean + y


FUNCTIONS: dict[str, Function] = {
    "layers": lambda x, y: [x := F.softmax(F.linear(x, torch.matmul(y.t(), y)), -1) for _ in range(3)][-1],
    "operands in another order": lambda x, y: (x - y, y - x, x - x, x / y, y / x),
    "numbers of other types": lambda x, y: (x.long() * 2, x.long() * 2.0, x.long() + True, x.long() + 1),
    "numbers that compare equal": lambda x, y: (torch.full_like(x, 0.0) / y, 1 / torch.full_like(x, -0.0), x + 0.0),
    "layouts": lambda x, y: (x.t().reshape(-1), x.t().contiguous().reshape(-1), x.reshape(-1), x.t().flatten()),
    "sizes": lambda x, y: (x.expand(3, *x.shape).reshape(3 * x.shape[0], -1), torch.arange(x.shape[0] * 2), x[:, 1:]),
    "swapped sizes": lambda x, y: (x @ y.t(), x.t() @ y, torch.zeros(x.shape[1], x.shape[0]) @ y),
    "sizes of sizes": lambda x, y: torch.cat([x, y])[: x.shape[0] + 1].flatten().view(x.shape[0] + 1, -1),
    "several results": lambda x, y: (*torch.max(x, 1), *torch.split(x, [1, 5], 1), *F.layer_norm(y, (6,))[:1]),
    "results twice": lambda x, y: (x, x, y, x.detach(), x + y),
    "dropout in evaluation mode": lambda x, y: F.dropout(x, 0.5, False) * F.dropout(y, 0.5, False),
    "constants": lambda x, y: x * torch.tensor([2.0]) + y * torch.tensor(3),
    "conjugates": lambda x, y: torch.view_as_real((torch.complex(x, y).conj() * torch.complex(y, x)).exp()),
    "negative views": lambda x, y: torch.complex(x, y).conj().imag + x,
    "batch normalization": normalized_twice,
    "written in place": read_before_and_after,
    "written behind a view": written_behind_a_view,
    "written into a part": written_into_a_part,
    "without gradients": with_no_grad,
    "sizes that depend on values": lambda x, y: x[x > 0].sum() + y,
}
FIXED = {"several results"}
"""Those of a fixed number of columns."""


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(every=2)
def test_a_decomposed_program_computes_what_its_module_does(name: str) -> None:
    torch.manual_seed(0)
    module = Module(FUNCTIONS[name])
    dims = {0: torch.export.Dim("rows", min=3)} | ({} if name in FIXED else {1: torch.export.Dim("columns", min=4)})
    program = torch.export.export(module, (torch.randn(5, 6), torch.randn(5, 6)), dynamic_shapes=(dims, dims))
    result = decomposed(program)
    for node in result.graph.nodes:
        assert not (private.is_operator(node.target) and private.is_mutable(node.target))
    for rows, columns in ((5, 6), (4, 6), *(() if name in FIXED else ((3, 8), (7, 4)))):
        batch = torch.randn(rows, columns), torch.randn(rows, columns)
        torch.testing.assert_close(result.module()(*batch), module(*batch), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_calls_that_are_alike_are_decomposed_once(whole_programs: list[int]) -> None:
    def layers(count: int) -> Function:
        def function(x: Tensor, y: Tensor) -> Tensor:
            for _ in range(count):
                x = F.softmax(F.gelu(x + y), -1).relu_()
            return x

        return function

    for count in (2, 20):
        decomposed(traced(layers(count)))
    few, many = whole_programs
    assert few == many


@pytest.mark.parametrize("name", ["written behind a view", "written into a part", "without gradients"])
def test_what_cannot_be_decomposed_by_calls_is_left_to_pytorch(name: str, whole_programs: list[int]) -> None:
    program = traced(FUNCTIONS[name])
    decomposed(program)
    assert whole_programs[-1] == sum(node.op == "call_function" for node in program.graph.nodes)


def test_a_program_stays_as_it_was() -> None:
    program = traced(read_before_and_after)
    before = copy.deepcopy(program.graph)
    decomposed(program)
    assert str(program.graph) == str(before)
