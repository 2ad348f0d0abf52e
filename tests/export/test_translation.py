"""`onnx_translation_table` in `torch.onnx.export`: fused nodes from ATen, right with and without the library."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from like_torch import assert_like_torch
from onnxscript import opset18
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import gradfuse
from gradfuse import ExportError, export_training_step
from gradfuse.export.translation import always_chosen
from gradfuse.testing import assert_gradients_close

Arguments = tuple[Tensor, ...]


def _ctc_batch(steps: int, items: int, labels: int) -> Arguments:
    lengths = torch.tensor([labels, *range(1, items)])[:items].clamp(max=labels)
    return torch.randn(steps, items, 5), torch.randint(1, 5, (items, labels)), torch.full((items,), steps), lengths


class Ctc(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        return F.ctc_loss(logits.log_softmax(-1), labels, input_lengths, target_lengths, reduction="none")


def _run(model: onnx.ModelProto, arguments: Arguments, *, kernels: bool) -> list[Any]:
    options = onnxruntime.SessionOptions()
    if kernels:
        gradfuse.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feeds = {value.name: one.numpy() for value, one in zip(session.get_inputs(), arguments, strict=True)}
    return list(session.run(None, feeds))


def _fused(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node if node.domain == "aclnn")


def _double(arguments: Arguments) -> Arguments:
    return tuple(one.double() if one.is_floating_point() else one for one in arguments)


def test_a_module_with_a_ctc_loss_exports() -> None:
    torch.manual_seed(0)
    dynamic = torch.export.Dim.DYNAMIC
    program = torch.onnx.export(
        Ctc().eval(),
        _ctc_batch(7, 2, 3),
        dynamo=True,
        verbose=False,
        dynamic_shapes=({0: dynamic, 1: dynamic}, {0: dynamic, 1: dynamic}, {0: dynamic}, {0: dynamic}),
        custom_translation_table=gradfuse.onnx_translation_table(),
    )
    assert program is not None
    model = gradfuse.fuse(program).model.model_proto
    onnx.checker.check_model(model, full_check=True)
    assert _fused(model) == ["CtcLoss"]
    batch = _ctc_batch(9, 3, 4)
    for kernels in (True, False):
        (losses,) = _run(model, batch, kernels=kernels)
        assert_gradients_close(losses, Ctc()(*batch), Ctc()(*_double(batch)), np.float32)


def _gradients(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def gradient(x: Tensor, target: Tensor) -> Tensor:
        return torch.autograd.grad(loss(x, target), x)[0]

    return gradient


def _nll(x: Tensor, target: Tensor) -> Tensor:
    weight = torch.tensor([0.5, 1.25, 2.0, 0.75, 1.0], dtype=x.dtype)
    return F.nll_loss(x.log_softmax(1), target, weight, ignore_index=2)


@pytest.mark.parametrize(
    "loss, target, fused",
    [
        (F.mse_loss, torch.linspace(-1, 1, 30).view(6, 5), ["MseLossBackward"]),
        # torch.onnx leaves out the division of its mean.
        (_nll, torch.tensor([0, 1, 2, 3, 4, 4]), ["CrossEntropyLossGrad"]),
    ],
)
def test_a_backward_pass_that_is_not_decomposed(loss: Callable[..., Tensor], target: Tensor, fused: list[str]) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, requires_grad=True)
    traced = make_fx(_gradients(loss))(x, target)
    program = torch.onnx.export(
        torch.export.export(traced, (x.detach(), target)),
        (),
        dynamo=True,
        verbose=False,
        custom_translation_table=gradfuse.onnx_translation_table(),
    )
    assert program is not None
    model = gradfuse.fuse(program, policy="all").model.model_proto
    assert _fused(model) == fused
    exact = _gradients(loss)(x.detach().double().requires_grad_(), *_double((target,)))
    for kernels in (True, False):
        (gradient,) = _run(model, (x.detach(), target), kernels=kernels)
        assert_gradients_close(gradient, _gradients(loss)(x, target), exact, np.float32)


class Operators(nn.Module):
    """`torch.ops.aclnn` with attributes, optional inputs, several outputs and defaults."""

    def forward(self, grad: Tensor, log_prob: Tensor, target: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        ops = torch.ops.aclnn
        lengths = torch.full_like(target[:2], 3)
        losses, _ = ops.ctc_loss(
            log_prob.view(3, 2, 5), target.view(2, 3) + 1, lengths, lengths - 2, zero_infinity=True
        )
        return (
            ops.cross_entropy_loss_grad(grad.sum(), log_prob, target, reduction="sum", label_smoothing=0.5),
            ops.grouped_bias_add_grad(grad, ends),
            ops.scaled_masked_softmax_backward(grad.view(1, 1, 6, 5), log_prob.view(1, 1, 6, 5), None, 0.5),
            losses,
        )


def test_operators_of_torch_become_their_nodes() -> None:
    importlib.import_module("gradfuse.torch")
    torch.manual_seed(0)
    arguments = (
        torch.randn(6, 5),
        torch.randn(6, 5).log_softmax(1),
        torch.tensor([0, 1, 2, 3, 3, 0]),
        torch.tensor([2, 2, 6]),
    )
    module = Operators().eval()
    table = gradfuse.onnx_translation_table()
    program = torch.onnx.export(module, arguments, dynamo=True, verbose=False, custom_translation_table=table)
    assert program is not None
    model = gradfuse.fuse(program).model.model_proto
    onnx.checker.check_model(model, full_check=True)
    assert _fused(model) == ["CrossEntropyLossGrad", "CtcLoss", "GroupedBiasAddGrad", "ScaledMaskedSoftmaxBackward"]
    exact = [one.double() for one in module(*arguments)]
    for kernels in (True, False):
        for result, native, reference in zip(
            _run(model, arguments, kernels=kernels), module(*arguments), exact, strict=True
        ):
            assert_gradients_close(result, native, reference, np.float32)


def test_a_translation_is_chosen_whatever_its_parameters_are() -> None:
    """Their names and number are not those of the operators, for which PyTorch has translations too."""

    def negated(anything: Any, *others: Any) -> Any:
        return opset18.Neg(anything)

    aten = torch.ops.aten
    table = always_chosen({aten.relu.default: negated, aten.leaky_relu.default: negated})
    x = torch.randn(2, 3)
    for module in (nn.ReLU().eval(), nn.LeakyReLU(0.5).eval()):
        program = torch.onnx.export(module, (x,), dynamo=True, verbose=False, custom_translation_table=table)
        assert program is not None
        (result,) = _run(program.model_proto, (x,), kernels=False)
        torch.testing.assert_close(torch.from_numpy(result), -x, rtol=0, atol=0)


def test_a_type_that_an_operator_does_not_take_is_named() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    traced = make_fx(_gradients(F.mse_loss))(x, torch.zeros_like(x))
    program = torch.export.export(traced, (x.detach(), torch.zeros_like(x)))
    message = r"MseLossBackward.*: grad_output is tensor\(double\); expected one of"
    with pytest.raises(torch.onnx.OnnxExporterError, match=message):
        torch.onnx.export(
            program, (), dynamo=True, verbose=False, custom_translation_table=gradfuse.onnx_translation_table()
        )


def test_lengths_in_lists_and_a_step_without_fused_operators() -> None:
    """`fuse=False` is for standard operators alone, so that CTC is its function bodies."""
    torch.manual_seed(0)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return F.ctc_loss(output.log_softmax(-1), labels, (6, 5), [2, 1])  # type: ignore[arg-type]

    module = nn.Linear(3, 5)
    batch = torch.randn(6, 2, 3), torch.tensor([[1, 2], [3, 0]])
    step = export_training_step(module, loss, batch, fuse=False)
    assert {node.domain for node in step.model.graph.node} == {""}
    assert not step.model.functions


CTC_LENGTHS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "int32": lambda x, y, m, n: F.ctc_loss(x, y, m.int(), n.int()),
    "int32 labels": lambda x, y, m, n: F.ctc_loss(x, y.int(), m.int(), n),
    "labels in a row": lambda x, y, m, n: F.ctc_loss(x, torch.cat([y[0, :3], y[1, :2]]), m, n.int()),
    "tuples": lambda x, y, m, n: F.ctc_loss(x, y, (7, 7), (3, 2)),  # type: ignore[arg-type]
    "one sequence": lambda x, y, m, n: F.ctc_loss(x[:, 0], y[0], m[0], n[0]),
    "one sequence, no reduction": lambda x, y, m, n: F.ctc_loss(x[:, 0], y[0], m[0], n[0], reduction="none"),
}


@pytest.mark.parametrize("name", CTC_LENGTHS)
@pytest.mark.sampled(every=2)
def test_ctc_losses_take_lengths_as_torch_does(name: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 5)
    batch = torch.randn(7, 2, 4), (torch.randint(1, 5, (2, 3)), torch.tensor([7, 7]), torch.tensor([3, 2]))

    def loss(output: Tensor, *targets: Tensor) -> Tensor:
        return CTC_LENGTHS[name](output.log_softmax(-1), *targets)

    assert_like_torch(export_training_step(module, loss, batch), module, loss, batch)


def test_a_table_takes_its_fake_kernels_with_it() -> None:
    """Other users of torch.export and torch.compile in the process see PyTorch as it is."""
    table = gradfuse.onnx_translation_table()
    with torch._subclasses.FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()):
        arguments = tuple(torch.empty_like(one) for one in _ctc_batch(7, 2, 3))
        losses, _ = torch.ops.aten._ctc_loss(*arguments)
        assert losses.shape == (2,)
        del table
        gc.collect()
        with pytest.raises(Exception, match="_ctc_loss"):
            torch.ops.aten._ctc_loss(*arguments)


@pytest.mark.parametrize("package", ["torch", "onnxscript"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExportError, match=f"onnx_translation_table: {package} is not installed; expected"):
        gradfuse.onnx_translation_table()
