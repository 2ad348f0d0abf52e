"""Convolutions in training steps: which nodes they become. Each export compares its numbers with PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.numpy_helper
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import TrainingStep, build_training_step, differentiate, export_training_step, register
from gradfuse.testing import assert_gradients_close


class Net(nn.Module):
    """A function of features and a convolution, between two layers."""

    def __init__(self, conv: nn.Module, function: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.first, self.conv, self.function = nn.Conv2d(2, 4, 1), conv, function
        self.last = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), self.conv).mean((2, 3)))  # type: ignore[no-any-return]


def exported(
    conv: nn.Module, function: Callable[[Tensor, nn.Module], Tensor] | None = None, **options: object
) -> TrainingStep:
    torch.manual_seed(0)
    net = Net(conv, function or (lambda x, conv: conv(x).relu()))
    batch = torch.randn(3, 2, 9, 8), torch.randint(0, 3, (3,))
    net(batch[0])
    return export_training_step(net, F.cross_entropy, batch, **options)  # type: ignore[arg-type]


def of_type(model: onnx.ModelProto, *op_types: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type in op_types]


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 6, 3),
        nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding=(1, 2), dilation=(2, 1), bias=False),
        nn.Conv2d(4, 6, 3, padding="same", groups=2),
        nn.Conv2d(4, 4, 3, groups=4),
    ],
    ids=str,
)
@pytest.mark.sampled(every=2)
def test_a_convolution_takes_the_relu_behind_it(conv: nn.Conv2d) -> None:
    step = exported(conv, evaluation=True)
    (node,) = of_type(step.model, "Convolution")
    found = attributes(node)
    assert (found["stride"], found["dilation"]) == (list(conv.stride), list(conv.dilation))
    assert (found["groups"], found["relu"]) == (conv.groups, 1)
    assert len([name for name in node.input if name]) == 2 + (conv.bias is not None)
    assert not of_type(step.model, "Relu")
    # The first one has a window of one element.
    assert len(of_type(step.model, "Conv")) == 1
    assert len(of_type(step.model, "ConvolutionBackward")) == 2
    assert step.evaluation_model is not None
    assert len(of_type(step.evaluation_model, "Conv")) == 2


@pytest.mark.parametrize(
    "function",
    [
        # The result is read twice.
        lambda x, conv: (y := conv(x)).relu() * y,
        lambda x, conv: conv(x).sigmoid(),
        lambda x, conv: (conv(x) + 1).relu(),
    ],
)
@pytest.mark.sampled(every=3)
def test_a_relu_that_does_not_follow_alone_stays(function: Callable[[Tensor, nn.Module], Tensor]) -> None:
    step = exported(nn.Conv2d(4, 5, 3), function)
    (node,) = of_type(step.model, "Convolution")
    assert not attributes(node).get("relu", 0)


def test_the_same_weight_over_the_same_image_in_two_ways() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 4, 3, 3) / 6)

        def forward(self, x: Tensor) -> Tensor:
            wide = F.conv2d(x, self.weight, stride=2, padding=1)
            return wide.relu().mean() + F.conv2d(x, self.weight, dilation=2).relu()

    step = exported(Twice(), lambda x, conv: conv(x))
    found = sorted(
        (attributes(node)["stride"], attributes(node)["dilation"]) for node in of_type(step.model, "Convolution")
    )
    assert found == [([1, 1], [2, 2]), ([2, 2], [1, 1])]


def test_a_weight_that_does_not_train_is_left_to_onnxruntime() -> None:
    conv = nn.Conv2d(4, 5, 3)
    conv.requires_grad_(False)
    step = exported(conv)
    assert not of_type(step.model, "Convolution")
    assert len(of_type(step.model, "Conv")) == 2


def test_without_fuse_all_stay() -> None:
    step = exported(nn.Conv2d(4, 5, 3), fuse=False)
    assert not [node for node in step.model.graph.node if node.domain]


@pytest.mark.parametrize("transposed", (False, True))
def test_models_that_have_the_operator_train_and_are_differentiated(transposed: bool) -> None:
    """One of PyTorch's own exporter, with `aclnn::Convolution` in the place of its convolution."""
    torch.manual_seed(0)
    given = {"x": torch.randn(2, 3, 7, 7), "weight": torch.randn(3, 4, 3, 3) if transposed else torch.randn(4, 3, 3, 3)}
    given["bias"] = torch.randn(4)
    function: Callable[..., Tensor] = F.conv_transpose2d if transposed else F.conv2d
    results: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        tensors = [value.to(dtype, copy=True).requires_grad_() for value in given.values()]
        loss = function(*tensors, stride=2).relu().mean()
        results.append([loss.detach(), *torch.autograd.grad(loss, tensors)])
    node = onnx.helper.make_node(
        "Convolution", list(given), ["y"], domain="aclnn", stride=[2], transposed=int(transposed), relu=1
    )
    graph = onnx.helper.make_graph(
        [node, onnx.helper.make_node("ReduceMean", ["y"], ["loss"], keepdims=0)],
        "convolution",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, given["x"].shape)],
        [onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, [])],
        [onnx.numpy_helper.from_array(given[name].numpy(), name) for name in ("weight", "bias")],
    )
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("aclnn", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)

    found = differentiate(model, wrt=list(given))
    options = ort.SessionOptions()
    register(options)
    session = ort.InferenceSession(found.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"x": given["x"].numpy()})
    for output, native, exact in zip(outputs, *results, strict=True):
        assert_gradients_close(output, native, exact, torch.float32, terms=float(exact.abs().max()))

    step = build_training_step(model, None)
    assert of_type(step.model, "ConvolutionBackward")
