"""What ApplySgd computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from onnx import TensorProto

from gradfuse.errors import ArgumentError

FLOAT, HALF, DOUBLE = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("nesterov", [0, 1])
def test_many_updates_are_those_of_torch(backend: str, nesterov: int) -> None:
    torch.manual_seed(0)
    leaf = torch.randn(6).requires_grad_()
    ours, buffer = leaf.detach().clone(), torch.zeros(6)
    attributes: dict[str, Any] = {"momentum": 0.75, "weight_decay": 0.5, "nesterov": nesterov}
    optimizer = torch.optim.SGD([leaf], lr=0.125, momentum=0.75, weight_decay=0.5, nesterov=bool(nesterov))
    for _ in range(20):
        leaf.grad = torch.randn(6)
        inputs = [ours, leaf.grad, torch.tensor(0.125), buffer]
        ours, buffer = run("ApplySgd", backend, *inputs, ranks=[1] * 2, **attributes)
        optimizer.step()
    torch.testing.assert_close(ours, leaf.detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_momentum_there_is_no_buffer(backend: str) -> None:
    inputs = [torch.ones(3), torch.tensor([1.0, -2.0, torch.inf]), torch.tensor(0.5)]
    parameter, buffer = run("ApplySgd", backend, *inputs, ranks=[1, 1])
    assert parameter.tolist() == [0.5, 2.0, -torch.inf]
    assert buffer.shape == (0,)


def test_shapes() -> None:
    rate = (FLOAT, ())
    tensor, named = (FLOAT, (2, 3)), (FLOAT, ("N", 3))
    assert inferred("ApplySgd", tensor, tensor, rate) == [(FLOAT, (2, 3)), (FLOAT, (0,))]
    assert inferred("ApplySgd", named, tensor, rate, named, momentum=0.5) == [(FLOAT, (2, 3))] * 2
    assert inferred("ApplySgd", (HALF, ()), (HALF, ()), rate, (HALF, ()), rate) == [(HALF, ())] * 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({1: (FLOAT, (3,))}, r"gradient is of shape \(3\); expected shape \(2, 3\), as parameter"),
        ({3: (FLOAT, (2, 4))}, "momentum_buffer is of dimension 1 4; expected dimension 1 3"),
        ({3: (HALF, (2, 3))}, r"momentum_buffer is tensor\(float16\); expected tensor\(float\), as parameter"),
        ({2: (FLOAT, (1,))}, r"learning_rate is of shape \(1\); expected shape \(\)"),
        ({4: (DOUBLE, ())}, r"gradient_scale is tensor\(double\); expected one of tensor\(float\)"),
        (dict.fromkeys((0, 1, 3), (FLOAT, (1,) * 9)), "parameter is of rank 9; expected at most rank 8"),
    ],
)
def test_refusals(change: dict[int, Any], message: str) -> None:
    inputs = [(FLOAT, (2, 3)), (FLOAT, (2, 3)), (FLOAT, ()), (FLOAT, (2, 3)), (FLOAT, ())]
    with pytest.raises(ArgumentError, match=rf"^ApplySgd \(node 'node'\): {message}"):
        inferred("ApplySgd", *[change.get(index, given) for index, given in enumerate(inputs)])


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"momentum": -0.5}, "momentum is -0.5; expected 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay is nan; expected 0 or more"),
        ({"nesterov": 2}, "nesterov is 2; expected 0 or 1"),
        ({"momentum": 0.5}, "momentum is 0.5; expected 0, as momentum_buffer is absent"),
        ({"nesterov": 1}, "nesterov is 1; expected 0, as momentum_buffer is absent"),
    ],
)
def test_refused_attributes(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred("ApplySgd", (FLOAT, (2,)), (FLOAT, (2,)), (FLOAT, ()), **attributes)
