"""What ApplyAdamW computes by its body, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, inferred, run
from onnx import TensorProto
from operators.apply_adam_w import SAMPLES, sample_of
from torch import Tensor

from gradfuse.custom_ops.apply_adam_w import exact_beta
from gradfuse.errors import ArgumentError

FLOAT, HALF, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64


def check(backend: str, tensors: list[Tensor], step: int, scale: float | None = None, **attributes: Any) -> None:
    sample = sample_of(tensors, step, scale, attributes)
    outputs = run("ApplyAdamW", backend, *sample.inputs, ranks=[tensors[0].dim()] * 3, **attributes)
    SAMPLES.assert_close([output.to(tensors[0].dtype) for output in outputs], sample, tensors[0].dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1, 8])
def test_any_rank(backend: str, dtype: torch.dtype, rank: int) -> None:
    torch.manual_seed(rank)
    tensors = [tensor.to(dtype) for tensor in torch.randn(4, *(2,) * rank)]
    check(backend, [*tensors[:3], tensors[3].abs()], step=2, scale=0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_updates_are_those_of_torch(backend: str) -> None:
    torch.manual_seed(0)
    leaf = torch.randn(6).requires_grad_()
    ours, mean, square = leaf.detach().clone(), torch.zeros(6), torch.zeros(6)
    optimizer = torch.optim.AdamW([leaf], lr=0.125, weight_decay=0.5)
    for step in range(20):
        leaf.grad = torch.randn(6)
        inputs = [ours, leaf.grad, mean, square, torch.tensor(0.125), torch.tensor(step)]
        ours, mean, square = run("ApplyAdamW", backend, *inputs, ranks=[1] * 3, weight_decay=0.5)
        optimizer.step()
    torch.testing.assert_close(ours, leaf.detach())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beta2", [0.999, 0.9999, 0.99999, 0.9999999])
def test_betas_have_seven_decimals_although_attributes_are_float32(backend: str, beta2: float) -> None:
    """1 - float32(0.9999999) is 1.19e-7."""
    one, zero = torch.ones(1), torch.zeros(1)
    inputs = [one, one, zero, zero, torch.tensor(0.5), torch.tensor(0)]
    _, _, square = run("ApplyAdamW", backend, *inputs, ranks=[1] * 3, beta2=beta2)
    assert square.item() == torch.tensor(1 - beta2).item()


def test_which_betas_are_exact() -> None:
    for beta in (0.0, 0.5, 0.9, 0.95, 0.98, 0.999, 0.9999999, 0.1234567, 1 - 1e-5):
        assert exact_beta(beta)
    for beta in (1.0, -0.5, 0.99999999, 1 / 3, 1e-8, float("nan")):
        assert not exact_beta(beta)


def test_shapes() -> None:
    scalars = ((FLOAT, ()), (INT64, ()))
    tensor, named, unknown = (FLOAT, (2, 3)), (FLOAT, ("N", 3)), (FLOAT, (None, 3))
    assert inferred("ApplyAdamW", *[tensor] * 4, *scalars) == [(FLOAT, (2, 3))] * 3
    assert inferred("ApplyAdamW", *[named] * 4, *scalars, (FLOAT, ())) == [(FLOAT, ("N", 3))] * 3
    assert inferred("ApplyAdamW", unknown, named, unknown, tensor, *scalars) == [(FLOAT, (2, 3))] * 3
    half = (HALF, ())
    assert inferred("ApplyAdamW", *[half] * 4, *scalars) == [(HALF, ())] * 3


@pytest.mark.parametrize(
    "change, message",
    [
        ({1: (FLOAT, (3,))}, r"gradient is of shape \(3\); expected shape \(2, 3\), as parameter"),
        ({3: (FLOAT, (2, 4))}, "exp_avg_sq is of dimension 1 4; expected dimension 1 3"),
        ({2: (HALF, (2, 3))}, r"exp_avg is tensor\(float16\); expected tensor\(float\), as parameter"),
        ({4: (FLOAT, (1,))}, r"learning_rate is of shape \(1\); expected shape \(\)"),
        ({5: (FLOAT, ())}, r"step is tensor\(float\); expected one of tensor\(int64\)"),
        ({6: (DOUBLE, ())}, r"gradient_scale is tensor\(double\); expected one of tensor\(float\)"),
        (dict.fromkeys(range(4), (DOUBLE, (2,))), r"parameter is tensor\(double\); expected one of"),
        (dict.fromkeys(range(4), (FLOAT, (1,) * 9)), "parameter is of rank 9; expected at most rank 8"),
    ],
)
def test_refusals(change: dict[int, Any], message: str) -> None:
    inputs = [(FLOAT, (2, 3))] * 4 + [(FLOAT, ()), (INT64, ()), (FLOAT, ())]
    with pytest.raises(ArgumentError, match=rf"^ApplyAdamW \(node 'node'\): {message}"):
        inferred("ApplyAdamW", *[change.get(index, given) for index, given in enumerate(inputs)])


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"beta1": 1.0}, r"beta1 is 1.0; expected a number in \[0, 1\)"),
        ({"beta2": -0.5}, r"beta2 is -0.5; expected a number in \[0, 1\)"),
        ({"epsilon": -1.0}, "epsilon is -1.0; expected 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay is nan; expected 0 or more"),
        ({"decoupled_weight_decay": 2}, "decoupled_weight_decay is 2; expected 0 or 1"),
    ],
)
def test_refused_attributes(attributes: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        inferred("ApplyAdamW", *[(FLOAT, (2,))] * 4, (FLOAT, ()), (INT64, ()), **attributes)
