"""Steps of models that plain torch.onnx.export wrote, the loss inside: gradients of torch, and nothing to fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_models import MODELS, Model

import gradfuse
from gradfuse import TrainingSession, build_training_step
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.long

NAMES = ("ResNet", "ConvNeXt", "ViT", "GPT", "GPT, scaled_dot_product_attention", "T5")


class WithLoss(nn.Module):
    """A model with its loss inside, of which torch.onnx.export drops the smoothing of labels."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model.module().eval()
        smooth = isinstance(model.loss, nn.CrossEntropyLoss)
        self.loss: Callable[..., Tensor] = F.cross_entropy if smooth else model.loss

    def forward(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        return self.loss(self.model(*inputs), *targets)


def by_torch(module: WithLoss, batch: Any, dtype: torch.dtype) -> tuple[float, dict[str, Any]]:
    def cast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)

    module = module.to(dtype)
    module.zero_grad()
    loss = module(*map(cast, batch))
    loss.backward()
    found = {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}
    module.to(torch.float32)
    return loss.item(), found


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_torch_and_nothing_is_found_twice(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]
    module, batch = WithLoss(model), model.batch(4, 8)
    program = torch.onnx.export(module, batch, dynamo=True, optimize=False, dynamic_shapes=model.dynamic_shapes)
    assert program is not None
    forward = program.model_proto
    parameters = {parameter for parameter, _ in module.named_parameters(remove_duplicate=False)}
    trained = [one.name for one in forward.graph.initializer if one.name in parameters]
    step = build_training_step(forward, None, trainable=trained, check=True)

    other = model.batch(3, 6)
    session = TrainingSession(step)
    inputs = dict(zip(step.input_names, [tensor.numpy() for part in other for tensor in part], strict=True))
    actual = session.step(inputs, ())
    (native_loss, native), (exact_loss, exact) = (by_torch(module, other, t) for t in (torch.float32, torch.float64))
    assert abs(actual - exact_loss) <= 2 * abs(native_loss - exact_loss) + 1e-5 * abs(exact_loss)
    # Of tied weights the file has one name.
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False) if name in trained}
    aliases = {name: names[id(p)] for name, p in module.named_parameters()}
    exact, native = ({aliases[name]: array for name, array in one.items()} for one in (exact, native))
    assert set(trained) == set(session.gradients) == set(exact)
    largest = max(float(np.abs(gradient).max()) for gradient in exact.values())
    for parameter, gradient in session.gradients.items():
        terms = 64 * max(float(np.abs(exact[parameter]).max()), 1e-2 * largest)
        assert_gradients_close(gradient, native[parameter], exact[parameter], np.float32, terms=terms)

    before = onnx.ModelProto.FromString(step.model.SerializeToString())
    again = gradfuse.fuse(before)
    new = [node.op_type for node in again.model.graph.node if node.domain == "aclnn"]
    assert sorted(new) == sorted(node.op_type for node in before.graph.node if node.domain == "aclnn")
    assert not [
        str(region) for region in gradfuse.explain(step.model).regions if region.status in ("fuses", "unprofitable")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_models_without_the_shapes_of_their_values_are_fused_and_differentiated_alike(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]
    module, batch = WithLoss(model), model.batch(4, 8)
    program = torch.onnx.export(module, batch, dynamo=True, optimize=False, dynamic_shapes=model.dynamic_shapes)
    assert program is not None
    given, bare = program.model_proto, onnx.ModelProto.FromString(program.model_proto.SerializeToString())
    del bare.graph.value_info[:]
    parameters = {parameter for parameter, _ in module.named_parameters(remove_duplicate=False)}
    trained = [one.name for one in given.graph.initializer if one.name in parameters]
    steps = [build_training_step(one, None, trainable=trained) for one in (given, bare)]
    fusions = [sorted(fusion.op for fusion in step.report.fusions) for step in steps if step.report is not None]
    assert len(fusions) == 2 and fusions[0] == fusions[1]
    sessions = [TrainingSession(step) for step in steps]
    inputs = dict(zip(steps[0].input_names, [tensor.numpy() for part in batch for tensor in part], strict=True))
    assert sessions[0].step(inputs, ()) == sessions[1].step(inputs, ())
    assert sessions[0].gradients.keys() == sessions[1].gradients.keys()
    for parameter, gradient in sessions[0].gradients.items():
        assert np.array_equal(gradient, sessions[1].gradients[parameter]), parameter
